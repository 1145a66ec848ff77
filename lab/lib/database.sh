# shellcheck shell=bash disable=SC2154 # variables of common.sh and of the command
# The data directory of the lab's own MariaDB. Creating one takes seconds, so an empty one is cached and copied.

make_database() {
  local data=$state_dir/hosts/login/var-spool/mysql seed
  [[ -d $data ]] && return
  seed=$cache_dir/mysql-$(dpkg-query -W -f '${Version}' mariadb-server | tr : -)
  [[ -d $seed ]] || make_seed "$seed"
  mkdir -p "$(dirname "$data")"
  cp -a --sparse=always "$seed" "$data"
}

make_seed() { # DIRECTORY
  local seed=$1 new=$1.new
  say "creating an empty database in $cache_dir (only once)"
  rm -rf "$new"
  mkdir -p "$new"
  chown mysql:mysql "$new"
  mariadb-install-db --no-defaults --user=mysql --datadir="$new" --skip-test-db \
    --innodb-log-file-size=8M > /dev/null
  # The database authenticates the system user `slurm` by its socket.
  mariadbd --no-defaults --bootstrap --user=mysql --datadir="$new" --innodb-log-file-size=8M > /dev/null 2>&1 <<'SQL'
FLUSH PRIVILEGES;
CREATE DATABASE slurm_acct_db;
CREATE USER slurm@localhost IDENTIFIED VIA unix_socket;
GRANT ALL ON slurm_acct_db.* TO slurm@localhost;
SQL
  mv "$new" "$seed"
}
