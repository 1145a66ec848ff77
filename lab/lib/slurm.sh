# shellcheck shell=bash disable=SC2154 # variables of common.sh and of the command
# Starts the daemons in the order of their dependencies. Running daemons are not restarted.

start_slurm() {
  start_daemons login
  in_every_node munge node
  wait_for 30 "the nodes to register" nodes_registered
}

start_daemons() { # HOST
  if [[ $1 == login ]]; then
    services login munge database accounting controller
  else
    services "$1" munge node
  fi
}

# After a change of slurm.conf. Jobs continue: slurmstepd is not restarted.
restart_slurm() {
  services login stop-controller
  in_every_node stop-node
}

services() { # HOST SERVICE...
  local host=$1
  shift
  in_host "$host" /opt/coracle-src/lab/lib/services "$@"
}

in_every_node() { # SERVICE...
  local i jobs=()
  for ((i = 1; i <= nodes; i++)); do
    services "node$i" "$@" &
    jobs+=($!)
  done
  wait_all "${jobs[@]}"
}

# `wait` with several pids returns only the last exit code.
wait_all() { # PID...
  local pid failed=0
  for pid in "$@"; do
    wait "$pid" || failed=1
  done
  return $failed
}

nodes_registered() {
  local host
  for host in $(host_names); do
    host_registered "$host" || return
  done
}

# Whether the node has registered with Slurm: neither down nor unknown, nor not responding (a star).
host_registered() { # HOST
  [[ $1 == login ]] && return
  [[ $(in_host login sinfo --noheader --nodes="$1" --partition=main --format='%t') =~ ^[a-z]+$ ]]
}
