# shellcheck shell=bash disable=SC2034,SC2154 # variables for, and of, the command that sources this
# What every lab command shares: where things are, how a host is recorded, and how we talk to the person.
#
# State directory (everything the lab owns is below it, and `lab/down` removes it):
#   config            the options that this lab was made with
#   pids/HOST         "PID STARTTIME" of the host's pid 1, as seen from outside; "switch" holds the bridge
#   etc/              the /etc of all hosts, with the lab's users, keys and Slurm configuration
#   home/             the /home of all hosts (with --private-homes: hosts/HOST/home)
#   hosts/HOST/       that host's own disk: tmp, var-tmp, var-spool, var-log, root

lab_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
repo_dir=$(dirname "$lab_dir")
state_dir=${CORACLE_LAB_DIR:-/run/coracle-lab}
dist_dir=${CORACLE_DIST:-$repo_dir/target/dist}
cache_dir=/var/cache/coracle-lab
readonly lab_dir repo_dir state_dir dist_dir cache_dir
readonly max_nodes=64

# A daemon must not inherit what happens to be in the caller's environment.
readonly clean_path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

say() { echo "lab: $*" >&2; }

die() {
  say "$*"
  exit 1
}

need_root() { ((EUID == 0)) || die "must be root: the lab makes namespaces and runs Slurm's daemons"; }

# One lab command changes the lab at a time. The lock lies beside the state directory, which comes and goes.
lock_lab() {
  exec 9> "$state_dir.lock"
  flock -w 120 9 || die "another lab command is still at work on $state_dir"
  # Whoever held it may have removed the file: then our lock is on nothing that others see.
  [[ /proc/self/fd/9 -ef $state_dir.lock ]] || lock_lab
}

remove_lock() { rm -f "$state_dir.lock"; }

# --- options this lab was made with -------------------------------------------------------------------------------

save_config() {
  printf 'nodes=%s\nprivate_homes=%s\nproctrack=%s\nhidepid=%s\n' "$nodes" "$private_homes" "$proctrack" "$hidepid" \
    > "$state_dir/config"
}

# Sets nodes, private_homes, proctrack and hidepid.
load_config() {
  [[ -e $state_dir/config ]] || return 1
  hidepid=no # a lab that is up may be older than the option
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

# --- processes, recorded so that a pid that was reused is never taken for ours -------------------------------------

# Prints when the process started, in clock ticks; fails if there is none, or only a zombie.
start_time() {
  local stat fields
  stat=$(< "/proc/$1/stat") 2> /dev/null || return 1
  # The command name (field 2) may hold spaces: count from behind its closing bracket.
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

# A command inside the host, as root, with a clean environment.
in_host() { # HOST CMD...
  local pid
  pid=$(host_pid "$1") || die "$1 is not up"
  shift
  nsenter --target "$pid" --mount --uts --ipc --net --pid --wd=/ -- env -i PATH="$clean_path" HOME=/root "$@" 9>&-
}
