#!/usr/bin/env bash
# SLURM with its controller and its one node on this host, to try `flnoisebench sweep --slurm` and
# `pytest -m slow tests/test_sweep.py -k slurm`.  For a throw-away machine: it needs root and writes /etc/slurm.
#
#   apt-get install slurm-wlm munge && bash benchmarks/slurm_one_host.sh
set -euo pipefail
host=$(hostname -s)
mkdir -p /run/munge /etc/slurm /var/spool/slurmd /var/spool/slurmctld
[ -f /etc/munge/munge.key ] || mungekey
chown munge: /run/munge /etc/munge/munge.key
pgrep -x munged >/dev/null || runuser -u munge -- munged
cat >/etc/slurm/slurm.conf <<CONF
ClusterName=one
SlurmctldHost=$host
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
NodeName=$host CPUs=$(nproc) RealMemory=4096 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
slurmctld
slurmd
sleep 3
sinfo
