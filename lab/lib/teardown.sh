# shellcheck shell=bash disable=SC2154 # variables of common.sh and of the command
# Ends everything that the lab started and removes everything that it made.

tear_down() {
  end_hosts
  remove_cgroups
  # By name and not the whole directory: CORACLE_LAB_DIR may have been set to one that holds other things.
  rm -rf "${state_dir:?}"/{config,ready,pids,logs,etc,home,hosts}
  rmdir "$state_dir" 2> /dev/null || true
}

end_hosts() {
  local record jobs=()
  for record in "$state_dir"/pids/*; do
    [[ -e $record ]] || continue
    stop_host "$(basename "$record")" &
    jobs+=($!)
  done
  ((${#jobs[@]} == 0)) || wait "${jobs[@]}"
}

end_hosts_above() { # N
  local record host
  for record in "$state_dir"/pids/node*; do
    host=$(basename "$record")
    if ((${host#node} > $1)); then
      stop_host "$host"
      rm -rf "${state_dir:?}/hosts/$host"
    fi
  done
}

# --proctrack cgroup: slurmd's cgroups lie in the machine's own hierarchy and outlive it.
remove_cgroups() {
  local cgroup
  for cgroup in /sys/fs/cgroup/*/slurm_node*; do
    [[ -d $cgroup ]] || continue
    find "$cgroup" -depth -type d -exec rmdir {} + 2> /dev/null || true
  done
}
