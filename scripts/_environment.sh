# shellcheck shell=bash
#
# Functions for the scripts beside this file; source it, do not run it.
#
# An environment is made in three moves: find a Python that JAX supports, bring uv, install what
# pyproject.toml asks for at the versions in constraints/. A stamp inside the environment says
# what it was made from, so that a second run only compares hashes.

set -euo pipefail

# A caller's modules must not leak into the environments made here.
unset PYTHONPATH PYTHONHOME

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
python_versions=(3.12 3.13 3.14) # the first is what constraints/ were resolved for

say() { printf '==> %s\n' "$*" >&2; }

# die LINE...: the lines are one message.
die() {
  printf 'error: ' >&2
  printf '%s\n' "$@" >&2
  exit 1
}

# base_python PROGRAM VERSION...: prints the interpreter behind PROGRAM if it is one of VERSIONs.
# A pyenv shim or a virtual environment's Python comes out as the real one; a shim without a
# version behind it fails to run and is left out.
base_python() {
  local program=$1
  shift
  "$program" -c '
import sys
if "%d.%d" % sys.version_info[:2] not in sys.argv[1:]:
    sys.exit(1)
print(getattr(sys, "_base_executable", sys.executable))' "$@" 2>/dev/null
}

# find_python VERSION...: prints a Python of one of the VERSIONs (like 3.12), the first before the
# others, from PATH or else from pyenv. Fails if there is none.
find_python() {
  local version program pyenv_root
  pyenv_root="${PYENV_ROOT:-$(pyenv root 2>/dev/null || echo "${HOME:-}/.pyenv")}"
  for version in "$@"; do
    while IFS= read -r program; do
      base_python "$program" "$version" && return
    done < <(
      type -aP "python$version" python3 python || true
      compgen -G "$pyenv_root/versions/$version*/bin/python3" || true
    )
  done
  return 1
}

# find_uv [PYTHON]: prints uv from PATH, else from .cache/uv, where the pip of PYTHON or of any
# other Python puts it without touching an environment of the user. Fails if there is no pip.
find_uv() {
  type -P uv && return
  local own="$root/.cache/uv" program
  if [[ ! -x $own/bin/uv ]]; then
    for program in "$@" python3 python; do
      "$program" -m pip install --quiet --disable-pip-version-check --no-warn-script-location \
        --root-user-action=ignore --target "$own" uv >/dev/null 2>&1 && break
    done
  fi
  [[ -x $own/bin/uv ]] && echo "$own/bin/uv"
}

# make_environment DIRECTORY JAX REQUIREMENT...: makes DIRECTORY (below the root) a virtual
# environment with the REQUIREMENTs, JAX pinned by constraints/JAX.txt. Does nothing if it was
# made from the same files before.
make_environment() {
  local directory=$1 jax=$2
  shift 2
  cd "$root"
  if is_made "$directory" "$jax" "$@"; then
    return
  fi
  (
    flock 9 # a second script waits here, then finds the environment made
    if ! is_made "$directory" "$jax" "$@"; then
      fill_environment "$directory" "$jax" "$@"
      environment_hash "$jax" "$@" >"$directory/.made-from"
    fi
  ) 9>"$root/.cache/$directory.lock"
}

is_made() {
  local directory=$1
  shift
  [[ -x $root/$directory/bin/python && -f $root/$directory/.made-from ]] &&
    [[ $(<"$root/$directory/.made-from") == "$(environment_hash "$@")" ]]
}

# environment_hash JAX REQUIREMENT...: names the content of an environment. The root is part of
# it because an environment cannot be moved; tools' settings change nothing that is installed.
environment_hash() {
  local jax=$1
  {
    echo "$root" "$@"
    sed '/^\[tool\./,$d' "$root/pyproject.toml"
    cat "$root/constraints/packages.txt" "$root/constraints/$jax.txt"
  } | sha256sum
}

fill_environment() {
  local directory=$1 jax=$2 python uv quiet=()
  shift 2
  [[ -t 2 ]] || quiet=(--quiet)
  local constraints=(-c constraints/packages.txt -c "constraints/$jax.txt")
  if [[ -n ${JPAGED_PYTHON:-} ]]; then
    python="$(base_python "$JPAGED_PYTHON" "${python_versions[@]}")" ||
      die "JPAGED_PYTHON is '$JPAGED_PYTHON'; it must be a working Python ${python_versions[*]}"
  else
    python="$(find_python "${python_versions[@]}")" || python=""
  fi
  uv="$(find_uv ${python:+"$python"})" || uv=""
  if [[ -z $python && -n $uv ]]; then
    say "None of Python ${python_versions[*]} found; asking uv for one"
    "$uv" python install "${quiet[@]}" "${python_versions[0]}" &&
      python="$("$uv" python find --managed-python "${python_versions[0]}")" || python=""
  fi
  [[ -n $python ]] || die \
    "jpaged needs one of Python ${python_versions[*]}, and none was found on PATH or in pyenv," \
    "nor could uv bring one. Install one (for example 'apt install python3.12 python3.12-venv'," \
    "'pyenv install 3.12' or 'uv python install 3.12') and run this again, or name one:" \
    "JPAGED_PYTHON=/path/to/python3.12 $0"

  say "Making $directory with $python (a minute or two the first time)"
  if [[ -n $uv ]] &&
    "$uv" venv --quiet --clear --python "$python" "$directory" &&
    "$uv" pip install "${quiet[@]}" --compile-bytecode --python "$directory/bin/python" \
      "${constraints[@]}" "$@"; then
    return
  fi
  # uv and pip read different settings for indexes and certificates; where uv's do not work,
  # pip's may.
  say "uv could not install; trying pip"
  rm -rf "$directory"
  if ! { "$python" -m venv "$directory" &&
    "$directory/bin/python" -m pip install --quiet --disable-pip-version-check \
      "${constraints[@]}" "$@"; }; then
    die "Neither uv nor pip could install the packages; their messages are above. Both need to" \
      "reach a Python package index, and about 1.5 GB of free disk."
  fi
}

# has_no_torch DIRECTORY: PyTorch belongs in .venv-goldens only.
has_no_torch() {
  "$root/$1/bin/python" -c \
    'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is not None)'
}

mkdir -p "$root/.cache"
