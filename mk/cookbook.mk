# The tinker-cookbook, unmodified, against a Spindle server: its own environment, then its tests. They skip, with the reason, where it cannot
# be installed.
COOKBOOK_VENV := $(VENV)-cookbook

.PHONY: cookbook
cookbook: $(COOKBOOK_VENV)/.built
	$(BIN)/python -m pytest -m cookbook tests/cookbook $(ARGS)

$(COOKBOOK_VENV)/.built: tests/cookbook/environment.py $(VENV)/.built
	@echo "== the cookbook's environment"
	@$(BIN)/python tests/cookbook/environment.py $(COOKBOOK_VENV)
	@if [ ! -e $(COOKBOOK_VENV)/reason ]; then touch $@; fi
