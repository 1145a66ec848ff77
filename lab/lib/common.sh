# shellcheck shell=bash disable=SC2034,SC2154 # variables for, and of, the command that sources this
# Shared by all lab commands: paths, records of hosts, and messages.
#
# The state directory contains all files of the lab, and `lab/down` removes it:
#   config            the options of this lab
#   pids/HOST         "PID STARTTIME" of the host's pid 1, in the machine's pid namespace; "switch" is the owner of the bridge
#   etc/              the /etc of all hosts, with the lab's users, keys and Slurm configuration
#   home/             the /home of all hosts (with --private-homes: hosts/HOST/home)
#   hosts/HOST/       the host's own disk: tmp, var-tmp, var-spool, var-log, root

lab_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
repo_dir=$(dirname "$lab_dir")
state_dir=${CORACLE_LAB_DIR:-/run/coracle-lab}
dist_dir=${CORACLE_DIST:-$repo_dir/target/dist}
cache_dir=/var/cache/coracle-lab
readonly lab_dir repo_dir state_dir dist_dir cache_dir
readonly max_nodes=64

# Daemons must not inherit the caller's environment.
readonly clean_path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

say() { echo "lab: $*" >&2; }

die() {
  say "$*"
  exit 1
}

need_root() { ((EUID == 0)) || die "must be root: the lab makes namespaces and runs Slurm's daemons"; }

# Only one command may change the lab at a time. The lock file is beside the state directory, which is created and removed.
lock_lab() {
  exec 9> "$state_dir.lock"
  flock -w 120 9 || die "another lab command is still running for $state_dir"
  # The previous holder may have removed the file: then lock the new one.
  [[ /proc/self/fd/9 -ef $state_dir.lock ]] || lock_lab
}

remove_lock() { rm -f "$state_dir.lock"; }

# --- options of this lab -----------------------------------------------------------------------------------------

save_config() {
  printf 'nodes=%s\nprivate_homes=%s\nproctrack=%s\nhidepid=%s\n' "$nodes" "$private_homes" "$proctrack" "$hidepid" \
    > "$state_dir/config"
}

# Sets nodes, private_homes, proctrack and hidepid.
load_config() {
  [[ -e $state_dir/config ]] || return 1
  hidepid=no # configurations of older labs lack this option
  # shellcheck disable=SC1091
  source "$state_dir/config"
}

host_names() {
  echo login
  local i
  for ((i = 1; i <= nodes; i++)); do echo "node$i"; done
}

# login is .1; node N is .10+N.
host_address() {
  case $1 in
    login) echo 10.77.0.1 ;;
    node*) echo "10.77.0.$((10 + ${1#node}))" ;;
  esac
}

# --- processes, recorded with their start time because pids are reused ---------------------------------------------

# Prints the start time of a process, in clock ticks; fails if it does not exist or is a zombie.
start_time() {
  local stat fields
  stat=$(< "/proc/$1/stat") 2> /dev/null || return 1
  # The command name (field 2) may contain spaces: count from its closing parenthesis.
  read -ra fields <<< "${stat##*) }"
  [[ ${fields[0]} != [ZX] ]] || return 1
  echo "${fields[19]}"
}

record_pid() { # HOST PID
  echo "$2 $(start_time "$2")" > "$state_dir/pids/$1"
}

# Prints the pid of the host's pid 1 if the host is alive.
host_pid() {
  local pid started
  read -r pid started 2> /dev/null < "$state_dir/pids/$1" || return 1
  [[ $(start_time "$pid" 2> /dev/null) == "$started" ]] || return 1
  echo "$pid"
}

# Runs a command on the host, as root, with a clean environment.
in_host() { # HOST CMD...
  local pid
  pid=$(host_pid "$1") || die "$1 is not up"
  shift
  nsenter --target "$pid" --mount --uts --ipc --net --pid --wd=/ -- env -i PATH="$clean_path" HOME=/root "$@" 9>&-
}
