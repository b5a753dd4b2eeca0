# Targets of the codec; included by the Makefile.

# The version check that protoc writes would tie us to the protobuf release that made the file; the code itself is older.
.PHONY: proto
proto:
	$(PYTHON) -m grpc_tools.protoc -I . --python_out . --pyi_out . spindle/codec/wire.proto
	sed -i '/^_runtime_version/,/^)/d; /runtime_version/d' spindle/codec/wire_pb2.py

CODEC_SOURCES := $(filter-out csrc/bindings.cpp,$(wildcard csrc/*.cpp))
CODEC_HEADERS := $(wildcard csrc/*.hpp)
ZSTD_FLAGS = $(shell pkg-config --cflags --libs libzstd)
FUZZ_SECONDS ?= 600
STRICT := -std=c++17 -O1 -g -fno-omit-frame-pointer -Wall -Wextra -Werror -Icsrc

# scan, fill and peek under AddressSanitizer and UndefinedBehaviorSanitizer, FUZZ_SECONDS long. With clang's libFuzzer when it is
# installed (apt-get install clang), else with our own driver.
.PHONY: fuzz fuzz-smoke
fuzz: $(if $(shell command -v clang++),fuzz/build/libfuzzer,fuzz/build/driver)
	mkdir -p fuzz/build/found
	if [ -x fuzz/build/libfuzzer ]; then \
		cd fuzz/build && ./libfuzzer -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=4096 -max_len=65536 -print_final_stats=1 found ../corpus; \
	else cd fuzz/build && timeout --preserve-status -s INT $(FUZZ_SECONDS) ./driver 1000000000 $$(date +%s) ../corpus/*; fi

# A fixed number of inputs from a fixed seed.
fuzz-smoke: fuzz/build/driver
	cd fuzz/build && ./driver 20000 1 ../corpus/*

fuzz/build/libfuzzer: fuzz/target.cpp $(CODEC_SOURCES) $(CODEC_HEADERS)
	mkdir -p fuzz/build
	clang++ $(STRICT) -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all fuzz/target.cpp $(CODEC_SOURCES) $(ZSTD_FLAGS) -o $@

fuzz/build/driver: fuzz/target.cpp fuzz/driver.cpp $(CODEC_SOURCES) $(CODEC_HEADERS)
	mkdir -p fuzz/build
	$(or $(CXX),g++) $(STRICT) -fsanitize=address,undefined -fno-sanitize-recover=all fuzz/target.cpp fuzz/driver.cpp $(CODEC_SOURCES) $(ZSTD_FLAGS) -o $@

# The extension built with AddressSanitizer and UndefinedBehaviorSanitizer in a tree of its own, and the codec's tests under it.
.PHONY: asan tsan
ASAN_TREE := build/asan
asan: $(VENV)/.built
	rm -rf $(ASAN_TREE) && mkdir -p $(ASAN_TREE)/spindle/codec $(ASAN_TREE)/tests
	cp -r csrc fuzz mk $(ASAN_TREE)/
	cp spindle/*.py $(ASAN_TREE)/spindle/ && cp spindle/codec/*.py* spindle/codec/*.proto $(ASAN_TREE)/spindle/codec/
	cp -r tests/__init__.py tests/codec $(ASAN_TREE)/tests/
	$(or $(CXX),g++) $(STRICT) -fPIC -shared -fvisibility=hidden -fsanitize=address,undefined -fno-sanitize-recover=undefined \
		$$($(BIN)/python -m pybind11 --includes) $(wildcard csrc/*.cpp) $(ZSTD_FLAGS) \
		-o $(ASAN_TREE)/spindle/codec/_codec$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
	cd $(ASAN_TREE) && LD_PRELOAD="$$($(or $(CXX),g++) -print-file-name=libasan.so) $$($(or $(CXX),g++) -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0 SPINDLE_SANITIZED=1 PYTHONPATH=. $(abspath $(BIN))/python -m pytest -q -p no:cacheprovider tests/codec $(ARGS)

# The C++ parts alone under ThreadSanitizer: eight threads that scan, fill, peek and share the pool.
tsan: fuzz/build/threads
	TSAN_OPTIONS=halt_on_error=1 fuzz/build/threads fuzz/corpus/*

fuzz/build/threads: fuzz/target.cpp fuzz/threads.cpp $(CODEC_SOURCES) $(CODEC_HEADERS)
	mkdir -p fuzz/build
	$(or $(CXX),g++) $(STRICT) -fsanitize=thread fuzz/target.cpp fuzz/threads.cpp $(CODEC_SOURCES) $(ZSTD_FLAGS) -pthread -o $@

.PHONY: cppcheck
cppcheck:
	cppcheck --enable=warning,performance,portability --std=c++17 --error-exitcode=1 --inline-suppr --suppress=missingIncludeSystem -q -Icsrc csrc fuzz benches
