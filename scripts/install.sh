# Makes .venv and installs what this machine needs; sourced by run.sh and test.sh. A second call changes nothing.
# usage: . scripts/install.sh; quickstart_install [extra ...]
#   extras of pyproject.toml beside `cpu` or `gpu`, which is found out here. A call of its own, because a sourced file
#   without arguments sees those of the script that sources it.
#
# PYTHON=/path/to/python chooses the interpreter; QUICKSTART_DEVICE=cpu|gpu overrules what is found.

quickstart_say() { printf '[install] %s\n' "$*" >&2; }

quickstart_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.12 python3.11 python3.10 python3; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
      command -v "$candidate"
      return 0
    fi
  done
  quickstart_say "no Python 3.10, 3.11 or 3.12 found: install one, or set PYTHON=/path/to/python"
  return 2
}

quickstart_device() {
  if [ -n "${QUICKSTART_DEVICE:-}" ]; then
    printf '%s' "$QUICKSTART_DEVICE"
  elif command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    printf 'gpu'
  else
    printf 'cpu'
  fi
}

# On Linux a bare `torch` is the CUDA build (several GB). The CPU build lies on this disk (a wheel in pip's
# find-links) or on PyTorch's own index; a Mac has no other build.
quickstart_cpu_torch() {
  local wanted=$1
  if [ "$(uname -s)" = Linux ]; then
    .venv/bin/pip install -q --no-index --no-deps "$wanted" 2>/dev/null ||
      .venv/bin/pip install -q --index-url https://download.pytorch.org/whl/cpu "$wanted"
  fi
}

# What is about to come, with its size on disk.
quickstart_parts() {
  if [ "$1" = gpu ]; then printf 'torch with CUDA, verl, transformers and what they need (several GB)'
  else printf 'torch, verl, transformers and what they need (2 GB)'; fi
}

quickstart_install() {
  local device extras stamp python wanted release began=$SECONDS
  device=$(quickstart_device)
  extras=$(IFS=,; printf '%s' "$device${*:+,$*}")
  release="$(cksum <pyproject.toml) $PWD"
  stamp="$extras $release"
  [ -f .venv/quickstart-installed ] && grep -qxF "$stamp" .venv/quickstart-installed && return 0
  if [ ! -x .venv/bin/python ]; then
    python=$(quickstart_python) || return 2
    quickstart_say "making .venv with $python"
    "$python" -m venv .venv || return 1
  fi
  quickstart_say "installing for $device into .venv: $(quickstart_parts "$device"); 2 to 5 minutes the first time,"
  quickstart_say "longer on a slow network. pip is silent until it is done; du -sh .venv in another terminal shows it grow"
  if [ "$device" = cpu ]; then
    wanted=$(sed -n 's/^cpu = \["\(torch==[^"]*\)"\]$/\1/p' pyproject.toml)
    quickstart_say "1 of 2: $wanted, the build for CPUs"
    quickstart_cpu_torch "$wanted" || return 1
    quickstart_say "2 of 2: verl, transformers and the rest"
  fi
  .venv/bin/pip install -q -e ".[$extras]" 2>.venv/quickstart-pip.log || {
    cat .venv/quickstart-pip.log >&2
    quickstart_say "installation failed; the lines above are pip's"
    return 1
  }
  printf '%s\n' "$device $release" "$stamp" >>.venv/quickstart-installed  # with extras is also without
  quickstart_say "installed in $((SECONDS - began)) s"
}
