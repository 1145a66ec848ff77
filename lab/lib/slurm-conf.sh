# shellcheck shell=bash disable=SC2154 # variables of common.sh and of the command
# Slurm's configuration files, written into the hosts' /etc/slurm.

readonly node_cpus=8 node_memory=8000

make_slurm_conf() {
  local dir=$state_dir/etc/slurm
  mkdir -p "$dir"
  slurm_conf > "$dir/slurm.conf"
  slurmdbd_conf > "$dir/slurmdbd.conf"
  gres_conf > "$dir/gres.conf"
  cgroup_conf > "$dir/cgroup.conf"
  chown slurm:slurm "$dir/slurmdbd.conf"
  chmod 600 "$dir/slurmdbd.conf" # slurmdbd refuses to start if others can read it
}

slurm_conf() {
  cat <<CONF
ClusterName=lab
SlurmctldHost=login
AuthType=auth/munge
CredType=cred/munge
SlurmUser=slurm
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
TmpFS=/tmp

# Ignore the real hardware: 16 nodes with 8 CPUs each on a machine with 2.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
DefMemPerCPU=500
TaskPlugin=task/none
MpiDefault=none
ProctrackType=proctrack/$proctrack
PreemptType=preempt/none

# Short for the tests, but of the same order as on real clusters.
KillWait=15
MinJobAge=300
SlurmctldTimeout=20
SlurmdTimeout=20
ReturnToService=2
InactiveLimit=0
UnkillableStepTimeout=60

# Start jobs at submission, not in the next scheduling cycle.
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=5,bf_interval=5

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=login
AccountingStorageEnforce=associations
AccountingStorageTRES=gres/gpu
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=5

NodeName=DEFAULT CPUs=$node_cpus Boards=1 SocketsPerBoard=1 CoresPerSocket=$node_cpus ThreadsPerCore=1 RealMemory=$node_memory State=UNKNOWN
$(slurm_nodes)
PartitionName=DEFAULT Nodes=ALL State=UP OverSubscribe=NO
PartitionName=main Default=YES MaxTime=02:00:00 DefaultTime=01:00:00
PartitionName=long MaxTime=7-00:00:00 DefaultTime=1-00:00:00
CONF
}

slurm_nodes() {
  # node1 has two GPUs that are copies of /dev/null.
  echo "NodeName=node1 NodeAddr=$(host_address node1) Gres=gpu:2"
  local i
  for ((i = 2; i <= nodes; i++)); do
    echo "NodeName=node$i NodeAddr=$(host_address "node$i")"
  done
}

slurmdbd_conf() {
  # The database authenticates clients by the user id of their socket: no password is needed.
  cat <<'CONF'
AuthType=auth/munge
DbdHost=login
SlurmUser=slurm
LogFile=/var/log/slurm/slurmdbd.log
PidFile=/run/slurm/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StorageLoc=slurm_acct_db
CONF
}

gres_conf() { echo "NodeName=node1 Name=gpu File=/dev/fake-gpu[0-1]"; }

cgroup_conf() {
  printf '%s\n' CgroupPlugin=cgroup/v1 CgroupMountpoint=/sys/fs/cgroup CgroupAutomount=no \
    ConstrainCores=no ConstrainRAMSpace=no ConstrainDevices=no
}
