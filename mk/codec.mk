# Targets of the codec; included by the Makefile.

# The version check that protoc writes would tie us to the protobuf release that made the file; the code itself is older.
.PHONY: proto
proto:
	$(PYTHON) -m grpc_tools.protoc -I . --python_out . --pyi_out . spindle/codec/wire.proto
	sed -i '/^_runtime_version/,/^)/d; /runtime_version/d' spindle/codec/wire_pb2.py
