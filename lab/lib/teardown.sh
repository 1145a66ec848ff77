# shellcheck shell=bash disable=SC2154 # variables of common.sh and of the command
# Kills all processes and removes all files of the lab.

tear_down() {
  stop_hosts
  remove_cgroups
  # Remove only known names: CORACLE_LAB_DIR may contain other files.
  rm -rf "${state_dir:?}"/{config,ready,pids,logs,etc,home,hosts}
  rmdir "$state_dir" 2> /dev/null || true
}

stop_hosts() {
  local record jobs=()
  for record in "$state_dir"/pids/*; do
    [[ -e $record ]] || continue
    stop_host "$(basename "$record")" &
    jobs+=($!)
  done
  ((${#jobs[@]} == 0)) || wait "${jobs[@]}"
}

stop_hosts_above() { # N
  local record host
  for record in "$state_dir"/pids/node*; do
    host=$(basename "$record")
    if ((${host#node} > $1)); then
      stop_host "$host"
      rm -rf "${state_dir:?}/hosts/$host"
    fi
  done
}

# With --proctrack cgroup, slurmd creates cgroups in the machine's hierarchy and does not remove them.
remove_cgroups() {
  local cgroup
  for cgroup in /sys/fs/cgroup/*/slurm_node*; do
    [[ -d $cgroup ]] || continue
    find "$cgroup" -depth -type d -exec rmdir {} + 2> /dev/null || true
  done
}
