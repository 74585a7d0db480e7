#!/bin/bash
# A SLURM of two nodes on this machine, from Debian's packages; nothing is installed, and no systemd is needed.
#
#   slurm.sh FOLDER start|stop       for commands with SLURM_CONF=FOLDER/slurm.conf; see slurm.sh FOLDER environment
#
# start ends with 77 where the packages cannot be fetched, or where this user may not run SLURM's daemons.
set -u
folder=$(realpath -m "$1")
root=$folder/root
libraries=$root/usr/lib/x86_64-linux-gnu
packages=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libmunge2 libhwloc15 liblua5.1-0)
daemons=(slurmd-n1 slurmd-n2 slurmctld munged)
export PATH=$root/usr/sbin:$root/usr/bin:$PATH SLURM_CONF=$folder/slurm.conf
export LD_LIBRARY_PATH=$libraries:$libraries/slurm-wlm${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

skip() {
  echo "slurm.sh: $1; skipped" >&2
  exit 77
}

fetch() {
  [ -x "$root/usr/sbin/slurmctld" ] && return
  command -v apt-get >/dev/null && command -v dpkg >/dev/null || skip "this is no Debian"
  mkdir -p "$folder/packages" "$root"
  (cd "$folder/packages" && timeout 300 apt-get download "${packages[@]}") >"$folder/download.txt" 2>&1 ||
    skip "SLURM's packages cannot be downloaded ($(tail -1 "$folder/download.txt"))"
  for file in "$folder"/packages/*.deb; do dpkg -x "$file" "$root" || skip "$file cannot be unpacked"; done
  for name in slurmctld slurmd slurmstepd; do
    if [ -e "$root/usr/sbin/$name-wlm" ]; then ln -sf "$name-wlm" "$root/usr/sbin/$name"; fi
  done
}

# A node answers the order to end a step once its ranks have ended. slurmctld sends it again 60 s after MessageTimeout:
# to the next start, whose step has the same number, where a test does not wait the two minutes of a requeued job.
configure() {
  local host
  host=$(hostname -s)
  cat >"$SLURM_CONF" <<END
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/run/munge
CredType=cred/munge
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmctldLogFile=$folder/log/slurmctld
SlurmdPidFile=$folder/run/slurmd-%n.pid
SlurmdLogFile=$folder/log/slurmd-%n
SlurmdSpoolDir=$folder/spool/%n
StateSaveLocation=$folder/state
PluginDir=$libraries/slurm-wlm
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=30
MessageTimeout=60
NodeName=n[1-2] NodeHostname=$host NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=1 RealMemory=2000 State=UNKNOWN
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
END
}

start() {
  [ "$(id -u)" = 0 ] || skip "SLURM's daemons of this test need root"
  [ "$(uname -m)" = x86_64 ] || skip "the packages of this test are for x86_64"
  fetch
  mkdir -p "$folder"/{state,run,log,spool/n1,spool/n2}
  chmod 755 "$folder" "$folder/run"
  head -c 1024 /dev/urandom >"$folder/key"
  chmod 400 "$folder/key"
  configure
  munged --force --key-file="$folder/key" --socket="$folder/run/munge" --pid-file="$folder/run/munged.pid" \
    --log-file="$folder/log/munged" --seed-file="$folder/run/seed" || skip "munged does not start, see $folder/log"
  slurmctld -c || skip "slurmctld does not start, see $folder/log"
  for name in n1 n2; do
    slurmd -d "$root/usr/sbin/slurmstepd" -N "$name" || skip "slurmd does not start, see $folder/log"
  done
  for _ in $(seq 60); do
    [ "$(sinfo --noheader --format=%t%D 2>/dev/null)" = idle2 ] && return
    sleep 0.5
  done
  sinfo >&2
  skip "its nodes are not idle after 30 s, see $folder/log"
}

stop() {
  for name in "${daemons[@]}"; do
    if [ -f "$folder/run/$name.pid" ]; then kill "$(cat "$folder/run/$name.pid")" 2>/dev/null; fi
  done
}

case "$2" in
  start) start ;;
  stop) stop ;;
  environment) echo "PATH=$PATH"; echo "SLURM_CONF=$SLURM_CONF"; echo "LD_LIBRARY_PATH=$LD_LIBRARY_PATH" ;;
  *) echo "slurm.sh FOLDER start|stop|environment" >&2; exit 2 ;;
esac
