# shellcheck shell=bash disable=SC2154 # variables of common.sh and of the command
# Starting and ending a host. A host is a pid 1 in namespaces of its own; when that ends, the kernel ends all else.

# The bridge lives in a network namespace of its own, so that the machine's has nothing of the lab.
start_switch() {
  host_pid switch > /dev/null && return
  start_holder switch --net -- "$lab_dir/lib/switch-init"
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

  start_holder "$host" --net --uts --ipc --pid --mount --fork -- \
    "$lab_dir/lib/host-init" "$host" "$disk" "$state_dir/etc" "$home" "$dist_dir" "$repo_dir" "$proc_options"
  plug_in "$host"
  wait_for 10 "$host to start" in_host "$host" test -e /run/host-ready
}

# A bind mount keeps showing a directory that was since replaced (by `cargo clean`, say): show the new one.
refresh_dist() { # HOST
  if [[ $(in_host "$1" stat -c %d:%i /opt/coracle) != "$(stat -c %d:%i "$dist_dir")" ]]; then
    in_host "$1" umount --lazy /opt/coracle
    in_host "$1" mount --no-mtab --bind -o ro "$dist_dir" /opt/coracle
  fi
}

make_disk() {
  local disk=$1
  # As Debian does at boot: /tmp is emptied, the rest is kept.
  rm -rf "$disk/tmp"
  mkdir -p "$disk"/{tmp,var-tmp,root,var-log/slurm,var-log/munge,var-spool/slurmd,var-spool/slurmctld}
  chmod 1777 "$disk/tmp" "$disk/var-tmp"
  chmod 700 "$disk/root" "$disk/var-log/munge"
  chown munge:munge "$disk/var-log/munge"
  chown slurm:slurm "$disk/var-log/slurm" "$disk/var-spool/slurmctld"
}

# Runs a holder process in new namespaces and records its pid before it does anything. The holder waits for our word on a
# pipe, and ends if we die before we give it: nothing can be left that is not recorded.
start_holder() { # NAME UNSHARE-OPTIONS... -- CMD...
  local name=$1 log=$state_dir/logs/$1.log options=() outer pid
  shift
  while [[ $1 != -- ]]; do
    options+=("$1")
    shift
  done
  shift
  local gate=$state_dir/pids/.gate-$name
  rm -f "$gate"
  mkfifo "$gate"
  env -i PATH="$clean_path" setsid unshare "${options[@]}" -- "$lab_dir/lib/gate" "$@" \
    < "$gate" >> "$log" 2>&1 9>&- &
  outer=$!
  # Opening waits for the holder's end; then the name can go.
  exec 8> "$gate"
  rm -f "$gate"
  pid=$outer
  if [[ " ${options[*]} " == *" --fork "* ]]; then pid=$(wait_for_child "$outer"); fi
  record_pid "$name" "$pid"
  echo go >&8
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

# A cable from the switch to the host's eth0, made inside the switch's namespace.
plug_in() {
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

# Power off, at once: the kernel kills every process of a pid namespace whose pid 1 dies.
stop_host() { # HOST
  local host=$1 pid net
  if pid=$(host_pid "$host"); then
    net=$(readlink "/proc/$pid/ns/net" || true)
    kill -KILL "$pid" 2> /dev/null || true
    end_members "$net"
    wait_for 10 "$host to end" not_alive "$host"
  fi
  rm -f "$state_dir/pids/$host"
}

not_alive() { ! host_pid "$1" > /dev/null; }

# What somebody put into the host's namespaces from outside its pid namespace (a packet dump, the outer half of `lab/on`).
end_members() { # NET-NAMESPACE
  local ns=$1 link pid
  [[ -n $ns && $ns != "$(readlink /proc/self/ns/net)" ]] || return 0
  while read -r link; do
    pid=${link#/proc/}
    kill -KILL "${pid%%/*}" 2> /dev/null || true
  done < <(find /proc/[0-9]*/ns/net -lname "$ns" 2> /dev/null)
}

wait_for() { # SECONDS WHAT CMD...
  local deadline=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" > /dev/null 2>&1; do
    ((SECONDS <= deadline)) || die "waited in vain for $what: see $state_dir/logs and $state_dir/hosts/*/var-log"
    sleep 0.05
  done
}
