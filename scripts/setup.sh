#!/usr/bin/env bash
# Makes .venv in the checkout, ready for `make demo` and `make test`; does nothing when it is ready already.
# Finds a Python and leaves the work to setup.py. PYTHON=/path/to/python names one, for instance that of an
# environment in which vLLM is installed already; its vLLM is then used and none is installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stamp=.venv/ems-setup.stamp
key=$({ cat pyproject.toml scripts/setup.sh scripts/setup.py; echo "$PWD ${PYTHON:-}"; } | sha256sum | cut -d' ' -f1)
[ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$key" ] && exit 0

fail() { echo "error: $1" >&2; exit 1; }

# Is it Python 3.11 or newer?
suits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
has() { "$1" -c "import importlib.util as u, sys; sys.exit(not all(u.find_spec(m) for m in sys.argv[1:]))" "${@:2}" 2>/dev/null; }

find_python() {
    local candidate first=""
    for candidate in python3 python; do  # an environment or an image that brings its own vLLM goes first
        suits "$candidate" && has "$candidate" vllm && { echo "$candidate"; return; }
    done
    for candidate in python3.11 python3.12 python3.13 python3 python3.14; do
        suits "$candidate" || continue
        has "$candidate" venv ensurepip && { echo "$candidate"; return; }
        first=${first:-$candidate}
    done
    echo "$first"
}

if [ -n "${PYTHON:-}" ]; then
    suits "$PYTHON" || fail "PYTHON=$PYTHON is not Python 3.11 or newer; name another one or leave PYTHON out"
    python=$PYTHON
else
    python=$(find_python)
    [ -n "$python" ] || fail "no Python 3.11 or newer on the PATH; install one or name it with PYTHON=/path/to/python"
fi
if ! has "$python" venv ensurepip; then
    package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "set-up: installing the Debian package $package" >&2
        said=$({ apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$package"; } 2>&1) ||
            fail "apt-get could not install $package, without which $python makes no environments: ${said##*$'\n'}"
    fi
    has "$python" venv ensurepip || fail "$python has no venv module; install the package $package or set PYTHON"
fi
exec "$python" scripts/setup.py --key "$key"
