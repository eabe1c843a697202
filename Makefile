PYTHON ?= $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV)/bin/python,.venv/bin/python)

.PHONY: check lint types spelling shell wheels test mutants campaign golden budget benchmark

check: lint types spelling shell wheels  ## lint, format, types, spelling, shell, wheels of the dependencies

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types:
	$(PYTHON) -m mypy

spelling:
	git ls-files -z '*.py' '*.md' '*.sh' '*.yaml' '*.toml' | xargs -0 $(PYTHON) -m codespell_lib

shell:
	"$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')/shellcheck" -x -P SCRIPTDIR scripts/*.sh compat/*/*.sh compat/*/*/*.sh compat/gpt2_chinese/run.swb .ci/run

wheels:
	$(PYTHON) tools/check_wheels.py

test:  ## the short suite
	bash scripts/test.sh

mutants:  ## plant faults in a copy of the project, and see that tests still find them, half an hour
	$(PYTHON) tests/mutants/run.py

campaign:  ## long fault and size runs, numerical tests with other kernels; read the figures it prints
	$(PYTHON) -m pytest --all -m campaign -s

golden:  ## rewrite the golden files after a wanted change of a default
	UPDATE_GOLDEN=1 $(PYTHON) -m pytest -q tests/common/config/test_presets.py tests/common/config/test_reference.py tests/common/resolve/test_parallel_mode.py tests/gpt2_study/test_definition.py tests/gpt2_study/test_report.py

budget:  ## lower the ceilings of size to today's numbers
	$(PYTHON) tests/test_budget.py

benchmark:  ## speed beside transformers, tokenizers and cp, half an hour; data: tools/fetch_quickstart_data.py
	$(PYTHON) benchmarks/run.py
