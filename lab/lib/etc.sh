# shellcheck shell=bash disable=SC2154 # variables of common.sh and of the command
# The /etc of all lab hosts: a copy of the machine's, plus the lab's users, names, keys and Slurm configuration.
# A copy, so that the machine's own accounts, subordinate ids and hosts file are never touched.

readonly user_ids=(user1:2001 user2:2002)

make_etc() {
  local etc=$state_dir/etc
  rm -rf "$etc"
  cp -a /etc "$etc"
  add_users "$etc"
  add_names "$etc"
  add_environment "$etc"
  add_munge_key "$etc"
}

add_users() {
  local etc=$1 entry user id
  # Only user1 has subordinate ids, so that both cases are tested.
  : > "$etc/subuid"
  : > "$etc/subgid"
  echo user1:200000:65536 | tee "$etc/subuid" > "$etc/subgid"
  for entry in "${user_ids[@]}"; do
    user=${entry%:*} id=${entry#*:}
    echo "$user:x:$id:$id:$user of the lab:/home/$user:/bin/bash" >> "$etc/passwd"
    echo "$user:x:$id:" >> "$etc/group"
    echo "$user:*:19000:0:99999:7:::" >> "$etc/shadow"
  done
}

make_homes() { # DIRECTORY
  local entry user id
  mkdir -p "$1"
  for entry in "${user_ids[@]}"; do
    user=${entry%:*} id=${entry#*:}
    [[ -d $1/$user ]] && continue
    mkdir -m 700 "$1/$user"
    cp /etc/skel/.bash* /etc/skel/.profile "$1/$user/"
    chown -R "$id:$id" "$1/$user"
  done
}

add_names() {
  local etc=$1 host
  {
    echo "127.0.0.1 localhost"
    echo "::1 localhost ip6-localhost ip6-loopback"
    for host in $(host_names); do echo "$(host_address "$host") $host"; done
  } > "$etc/hosts"
  # The lab has no DNS server: queries for unknown names must fail at once.
  rm -f "$etc/resolv.conf"
  echo "options timeout:1 attempts:1" > "$etc/resolv.conf"
}

add_environment() {
  cat > "$1/profile.d/coracle.sh" <<'PROFILE'
case ":$PATH:" in
  *:/opt/coracle/bin:*) ;;
  *) PATH=/opt/coracle/bin:$PATH ;;
esac
PROFILE
}

add_munge_key() {
  local etc=$1
  mkdir -p "$etc/munge"
  head -c 1024 /dev/urandom > "$etc/munge/munge.key"
  chown -R munge:munge "$etc/munge"
  chmod 700 "$etc/munge"
  chmod 400 "$etc/munge/munge.key"
}
