#!/usr/bin/env bash
# A SLURM cluster of one node, this machine, for the tests that start jobs with sbatch and srun.
#     scripts/slurm_for_tests.sh         installs what is missing (Debian, as root) and starts it
#     scripts/slurm_for_tests.sh stop    ends its daemons; what was installed stays
# Configuration, keys, logs and ports are its own: no other SLURM on this machine is touched.
set -euo pipefail

# Not under /tmp: munged refuses a key that stands where other users may write.
state=/run/slurm_for_tests
export SLURM_CONF=$state/slurm.conf
host=$(hostname -s)

fail() { echo "error: no SLURM for the tests: $*" >&2; exit 1; }

install_packages() {
    if command -v sinfo sbatch srun slurmctld slurmd munged > /dev/null; then
        return
    fi
    command -v apt-get > /dev/null || fail "it is not installed, and there is no apt-get to do so"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq || fail "apt-get update failed"
    apt-get install -y -qq --no-install-recommends slurm-wlm munge \
        || fail "apt-get could not install slurm-wlm and munge"
}

write_configuration() {
    mkdir -p "$state"/{munge,ctld,d}
    # munged wants its socket within reach of all users, and the key of none.
    chmod 755 "$state" "$state/munge"
    (umask 077; head -c 1024 /dev/urandom > "$state/munge/key")
    # pgid and none: cgroups may be out of reach in a container. Without config_overrides a machine
    # of one CPU would count as broken, with the two CPUs that two tasks need.
    cat > "$SLURM_CONF" <<END
ClusterName=tests
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$state/munge/socket
StateSaveLocation=$state/ctld
SlurmdSpoolDir=$state/d
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd.pid
SlurmctldLogFile=$state/slurmctld.log
SlurmdLogFile=$state/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=tests Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
}

start_daemons() {
    munged --key-file="$state/munge/key" --socket="$state/munge/socket" \
        --pid-file="$state/munged.pid" --log-file="$state/munge/log" \
        --seed-file="$state/munge/seed" || fail "munged does not start"
    slurmctld -f "$SLURM_CONF" || fail "slurmctld does not start, see $state/slurmctld.log"
    slurmd -f "$SLURM_CONF" || fail "slurmd does not start, see $state/slurmd.log"
}

# The state is "idle*" where the node does not answer.
node_is_idle() { [ "$(timeout 10 sinfo --noheader --format=%T 2> /dev/null)" = idle ]; }

wait_until_idle() {
    for _ in $(seq 60); do
        if node_is_idle; then
            return
        fi
        sleep 1
    done
    tail -n 5 "$state"/slurm*.log >&2
    fail "the node is not idle after a minute: $(sinfo --noheader 2>&1)"
}

stop_daemons() {
    # Jobs outlive slurmd; here nobody would look after them.
    if [ -e "$SLURM_CONF" ] && command -v scancel > /dev/null; then
        timeout 10 scancel --full --signal=KILL --user=root 2> /dev/null || true
    fi
    for name in slurmd slurmctld munged; do
        pid=$(cat "$state/$name.pid" 2> /dev/null) || continue
        # The number may be another process's by now.
        if [ "$(cat "/proc/$pid/comm" 2> /dev/null)" = "$name" ]; then
            kill "$pid"
            timeout 20 tail --pid="$pid" -f /dev/null || kill -KILL "$pid"
        fi
    done
    rm -rf "$state"
}

[ "$(id -u)" = 0 ] || fail "installing and starting it takes root"
if [ "${1-}" = stop ]; then
    stop_daemons
    exit
fi
install_packages
getent hosts "$host" > /dev/null \
    || fail "this machine's name, $host, has no address: see /etc/hosts"
if ! node_is_idle; then
    stop_daemons
    write_configuration
    start_daemons
    wait_until_idle
fi
echo "SLURM for the tests is ready: SLURM_CONF=$SLURM_CONF"
