#!/bin/sh
# What process 1 of a node does: make the machine's files look like a node's, start sshd, wait to be ended.
# usage: node_init.sh NAME FILES SHARED...    FILES: folder with what the lab wrote for its nodes
# It tells its process id as the machine counts it, reads its address, says "ready"; when its standard input
# is closed, which the lab's death does too, it ends and the kernel ends every process of the node.
set -eu
read -r pid _ </proc/self/stat
echo "$pid"
name=$1 files=$2
shift 2
hostname "$name"
mount -t proc proc /proc
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
# Its own /sys shows its own interfaces; control groups stay as they are, Slurm looks for them.
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/cgroup /run/sshd /run/tmp /run/etc /run/spool
mount --rbind /sys/fs/cgroup /run/cgroup
mount -t sysfs sysfs /sys
mount --rbind /run/cgroup /sys/fs/cgroup
umount --lazy /run/cgroup
# Its own /tmp, with the shared folders in it.
mount -t tmpfs -o mode=1777 tmpfs /run/tmp
for folder; do
    mkdir -p "/run/tmp/${folder#/tmp/}"
    mount --bind "$folder" "/run/tmp/${folder#/tmp/}"
done
mount --move /run/tmp /tmp
# Its own configuration and queues: no daemon's settings reach the machine.
cp -a /etc/. /run/etc/
cp -a /var/spool/. /run/spool/
mount --bind /run/etc /etc
mount --bind /run/spool /var/spool
echo "$name" >/etc/hostname
cat "$files/hosts" >/etc/hosts
: >/etc/resolv.conf # asks 127.0.0.1, where nobody answers: an unknown name is known to be one at once
cp "$files/ssh_config" /etc/ssh/ssh_config
sed -i 's/^root:![^:]*:/root:*:/' /etc/shadow # a locked account may not log in by key either
# The user's own ssh settings and start-up files would come before the lab's, and Horovod remembers there for
# an hour which hosts it has reached.
home=${HOME:-/root}
for folder in "$home/.ssh" "$home/.horovod"; do
    if [ -d "$folder" ]; then mount -t tmpfs -o mode=700 tmpfs "$folder"; fi
done
if [ -f "$home/.bashrc" ]; then mount --bind /dev/null "$home/.bashrc"; fi
read -r address
ip link set lo up
ip addr add "$address/24" dev eth0
ip link set eth0 up
/usr/sbin/sshd -f "$files/sshd_config" -E "$files/$name.sshd.log"
echo ready
# Processes whose parents have ended become this one's children: ignored, the kernel buries them. Not by `trap`:
# dash ignores the signal no longer when it becomes another program.
exec env --ignore-signal=CHLD cat >/dev/null
