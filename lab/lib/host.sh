# shellcheck shell=bash disable=SC2154 # variables of common.sh and of the command
# Starts and stops hosts. A host is a pid 1 in its own namespaces; when it exits, the kernel kills all other processes of the host.

# The bridge is in its own network namespace, so that the machine's is not changed.
start_switch() {
  host_pid switch > /dev/null && return
  start_recorded switch --net -- "$lab_dir/lib/switch-init"
}

start_host() { # HOST
  local host=$1 disk=$state_dir/hosts/$1 home proc_options=nosuid,nodev,noexec
  if host_pid "$host" > /dev/null; then
    refresh_dist "$host"
    return
  fi
  make_disk "$disk"
  home=$state_dir/home
  if [[ $private_homes == yes ]]; then home=$disk/home; fi
  make_homes "$home"
  if [[ $hidepid == yes && $host != login ]]; then proc_options+=,hidepid=2; fi

  start_recorded "$host" --net --uts --ipc --pid --mount --fork -- \
    "$lab_dir/lib/host-init" "$host" "$disk" "$state_dir/etc" "$home" "$dist_dir" "$repo_dir" "$proc_options"
  connect_to_switch "$host"
  wait_for 10 "$host to start" in_host "$host" test -e /run/host-ready
}

# A bind mount still shows a directory that was replaced, for example by `cargo clean`: mount the new one.
refresh_dist() { # HOST
  if [[ $(in_host "$1" stat -c %d:%i /opt/coracle) != "$(stat -c %d:%i "$dist_dir")" ]]; then
    in_host "$1" umount --lazy /opt/coracle
    in_host "$1" mount --no-mtab --bind -o ro "$dist_dir" /opt/coracle
  fi
}

make_disk() {
  local disk=$1
  # Like Debian at boot: empty /tmp, keep the rest.
  rm -rf "$disk/tmp"
  mkdir -p "$disk"/{tmp,var-tmp,root,var-log/slurm,var-log/munge,var-spool/slurmd,var-spool/slurmctld}
  chmod 1777 "$disk/tmp" "$disk/var-tmp"
  chmod 700 "$disk/root" "$disk/var-log/munge"
  chown munge:munge "$disk/var-log/munge"
  chown slurm:slurm "$disk/var-log/slurm" "$disk/var-spool/slurmctld"
}

# Starts the first process of new namespaces and records its pid before it does anything. The process waits for a line on a pipe, and
# exits if this script exits before: every process that is left is recorded.
start_recorded() { # NAME UNSHARE-OPTIONS... -- CMD...
  local name=$1 log=$state_dir/logs/$1.log options=() outer pid
  shift
  while [[ $1 != -- ]]; do
    options+=("$1")
    shift
  done
  shift
  local pipe=$state_dir/pids/.pipe-$name
  rm -f "$pipe"
  mkfifo "$pipe"
  env -i PATH="$clean_path" setsid unshare "${options[@]}" -- "$lab_dir/lib/wait-for-start" "$@" \
    < "$pipe" >> "$log" 2>&1 9>&- &
  outer=$!
  # Opening blocks until the process has opened the pipe for reading; then its name is not needed any more.
  exec 8> "$pipe"
  rm -f "$pipe"
  pid=$outer
  if [[ " ${options[*]} " == *" --fork "* ]]; then pid=$(wait_for_child "$outer"); fi
  record_pid "$name" "$pid"
  echo start >&8
  exec 8>&-
  disown "$outer"
}

wait_for_child() { # PID
  local child i
  for ((i = 0; i < 500; i++)); do
    read -r child _ 2> /dev/null < "/proc/$1/task/$1/children" || true
    if [[ -n ${child:-} ]]; then
      echo "$child"
      return
    fi
    sleep 0.01
  done
  die "a host did not start: see $state_dir/logs"
}

# Creates a veth pair between the switch and the host's eth0, in the switch's namespace.
connect_to_switch() {
  local host=$1 switch pid
  switch=$(host_pid switch) || die "the switch is not up"
  pid=$(host_pid "$host") || die "$host did not start: see $state_dir/logs/$host.log"
  nsenter --target "$switch" --net -- ip -batch - <<BATCH
link add name to-$host type veth peer name eth0 netns $pid
link set dev to-$host master lab0 up
BATCH
  nsenter --target "$pid" --net -- ip -batch - <<BATCH
link set dev lo up
address add $(host_address "$host")/24 broadcast + dev eth0
link set dev eth0 up
BATCH
}

# Like a loss of power: the kernel kills every process of a pid namespace when its pid 1 exits.
stop_host() { # HOST
  local host=$1 pid net
  if pid=$(host_pid "$host"); then
    net=$(readlink "/proc/$pid/ns/net" || true)
    kill -KILL "$pid" 2> /dev/null || true
    kill_members "$net"
    wait_for 10 "$host to end" not_alive "$host"
  fi
  rm -f "$state_dir/pids/$host"
}

not_alive() { ! host_pid "$1" > /dev/null; }

# Kills processes in the host's network namespace that are outside of its pid namespace (a packet dump, the outer half of `lab/on`).
kill_members() { # NET-NAMESPACE
  local ns=$1 link pid
  [[ -n $ns && $ns != "$(readlink /proc/self/ns/net)" ]] || return 0
  while read -r link; do
    pid=${link#/proc/}
    kill -KILL "${pid%%/*}" 2> /dev/null || true
  done < <(find /proc/[0-9]*/ns/net -lname "$ns" 2> /dev/null)
}

wait_for() { # SECONDS DESCRIPTION CMD...
  local deadline=$((SECONDS + $1)) description=$2
  shift 2
  until "$@" > /dev/null 2>&1; do
    ((SECONDS <= deadline)) || die "timed out waiting for $description: see $state_dir/logs and $state_dir/hosts/*/var-log"
    sleep 0.05
  done
}
