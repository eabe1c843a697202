# shellcheck shell=bash
# Sourced by the scripts beside it: one way to find or make the Python environment.
# Order: $PYTHON, else the active virtual or conda environment (conda's base is none), else the repository's .venv.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# find_python: sets PYTHON, or returns 1 when there is no environment yet.
find_python() {
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null || { echo "error: PYTHON=$PYTHON is not a program" >&2; exit 2; }
    elif [ -n "${VIRTUAL_ENV:-}" ] && [ -x "$VIRTUAL_ENV/bin/python" ]; then
        PYTHON=$VIRTUAL_ENV/bin/python
    elif [ -n "${CONDA_PREFIX:-}" ] && [ "${CONDA_DEFAULT_ENV:-}" != base ] && [ -x "$CONDA_PREFIX/bin/python" ]; then
        PYTHON=$CONDA_PREFIX/bin/python
    elif [ -x "$ROOT/.venv/bin/pip" ]; then # the last thing that venv makes
        PYTHON=$ROOT/.venv/bin/python
    else
        return 1
    fi
}

# help_at_head WORDS: where a word asks for help, shows the comment at the head of the script, and ends.
help_at_head() {
    local word
    for word in "$@"; do case "$word" in --help | -h)
        sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0"
        exit 0 ;;
    esac; done
}

# help_without_python WORDS: the same, only where use_python finds nothing that can give the program's own help.
help_without_python() {
    [[ " $* " != *" --help "* && " $* " != *" -h "* ]] || (use_python) >/dev/null 2>&1 || help_at_head "$@"
}

# use_python: sets PYTHON to an interpreter that holds the project, or ends with one message. Where there is no environment, the
# python of the PATH may do.
use_python() {
    find_python || PYTHON=$(command -v python || command -v python3) || { echo "error: no Python found; $(how_to_fix)" >&2; exit 2; }
    check_python
}

check_python() {
    local why
    why=$("$PYTHON" - 2>&1 <<'END'
import sys
if sys.version_info < (3, 11):
    sys.exit("it is Python %d.%d, expected 3.11 or newer" % sys.version_info[:2])
try:
    import numpy, psutil, pydantic, yaml
except Exception as error:
    sys.exit("it does not hold the project's libraries: %s" % error)
END
    ) || { echo "error: $PYTHON cannot be used: ${why##*$'\n'}; $(how_to_fix)" >&2; exit 2; }
}

how_to_fix() {
    echo "run 'bash $ROOT/scripts/quickstart.sh' once, which makes $ROOT/.venv;" \
        "or install into an environment of your own, pip install -c constraints.txt -e '.[torch,fast]' in $ROOT, and activate it;" \
        "or set PYTHON to its interpreter"
}

# use_environment EXTRAS [OPTIONAL]: sets PYTHON to an environment that holds the project with these extras (comma separated).
# An optional one that has no package for this Python or processor is left out with a line.
# An environment of the user's own ($PYTHON, or an active one) is used as it is; only .venv is made and filled here.
use_environment() {
    local extras=$1 optional=${2:-} extra why
    find_python || make_environment
    if [ -z "$optional" ] || ! install_project "$extras,$optional" 2>/dev/null; then
        install_project "$extras" || { echo "error: installation failed; pip's message is above" >&2; exit 1; }
        for extra in ${optional//,/ }; do
            why=$(install_project "$extras,$extra" 2>&1 >&3) ||
                echo "left out: the extra $extra, on Python $("$PYTHON" -c 'import platform as p; print(p.python_version(), p.machine())'): $(grep -im1 '^error' <<<"$why" | cut -d' ' -f2-)" >&2
        done 3>&1
    fi
    check_python
    export PYTHON
}

make_environment() {
    local base
    for base in python3 python3.12 python3.11 python3.13; do
        if "$base" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            echo "making .venv with $("$base" --version)"
            "$base" -m venv "$ROOT/.venv"
            PYTHON=$ROOT/.venv/bin/python
            return
        fi
    done
    echo "error: no Python 3.11 to 3.13 with venv found; install one, or set PYTHON to an interpreter" >&2
    exit 2
}

# install_project EXTRAS: pip installs into .venv unless these extras are there already; returns 1 when pip fails.
# Does not change an environment of the user's own.
# Modules are compiled when they are first imported, which is a fraction of them.
install_project() {
    local extras=$1 stamp=$ROOT/.venv/installed wanted
    [ "$PYTHON" = "$ROOT/.venv/bin/python" ] || return 0
    wanted="$extras $(cat "$ROOT/pyproject.toml" "$ROOT/requirements.txt" "$ROOT/constraints.txt" | sha256sum | cut -d' ' -f1)"
    if grep -qxF "$wanted" "$stamp" 2>/dev/null; then return; fi
    echo "installing the project with [$extras] into .venv (minutes, the first time)"
    local quiet=(--quiet)
    if [ -t 1 ]; then quiet=(); fi # pip's progress, for who is watching
    "$PYTHON" -m pip install --no-compile ${quiet[@]+"${quiet[@]}"} --disable-pip-version-check -c "$ROOT/constraints.txt" -e "${ROOT}[$extras]" || return 1
    echo "$wanted" >>"$stamp"
}
