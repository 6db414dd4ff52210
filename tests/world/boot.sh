#!/bin/sh
# The first process of an emulated machine, as root in namespaces of its own: `boot.sh HOST READABLE FOLDER...`.
# Every FOLDER becomes a private view of the real one, in which what is written stays on this machine and ends with it.
# HOST holds what it shares with the world: `shared/` (user-data, stand-ins for shutdown, what was asked of them).
set -eu
host=$1 readable=$2
shift 2
ip route add default dev eth0 # the metadata service is beyond the link, as on EC2
mount -t tmpfs -o mode=755 world "$host/private"
view() {
  own=$host/private/$(echo "$1" | tr / -)
  mkdir -p "$own/up" "$own/work"
  chown --reference="$1" "$own/up"
  chmod --reference="$1" "$own/up"
  mount -t overlay -o "lowerdir=$1,upperdir=$own/up,workdir=$own/work" world "$1"
}
view /run
mkdir /run/world
mount --bind "$host/shared" /run/world
for folder in "$@"; do view "$folder"; done # the one that holds HOST comes last
mount -t tmpfs -o mode=1777 shm /dev/shm
for folder in $readable; do chmod a+rx "$folder"; done # the Python of a real image is for every user
for tool in shutdown poweroff halt reboot systemctl; do
  for place in /usr/sbin /usr/bin; do
    if [ -e "$place/$tool" ]; then mount --bind /run/world/bin/shutdown "$(readlink -f "$place/$tool")"; fi
  done
done
scripts=/var/lib/cloud/instance/scripts
mkdir -p "$scripts"
cp /run/world/user-data "$scripts/part-001"
chmod 700 "$scripts/part-001"
cd /
set +e
env -i PATH=/run/world/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 "$scripts/part-001"
echo $? >/run/world/exited
exec sleep infinity
