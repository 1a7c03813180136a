#!/bin/sh
# Boots a small guest whose kernel has two soft-RoCE devices that reach each other over a pair of virtual Ethernets, and runs a program of this machine in it:
#   run.sh KERNEL MODULES PROGRAM [ARGUMENT]...
# KERNEL is a bzImage, MODULES its folder lib/modules/VERSION/kernel (apt-get download linux-image-..., dpkg -x: nothing is installed). The program is called
# with "rxe0 rxe1" behind its arguments; it sees this machine's files, read-only. Needs qemu-system-x86_64, busybox (static), cpio, ip and rdma. Exit code: the program's;
# 77: something of that is missing, which is said. Without arguments it only looks for that. EP_GUEST_SECONDS: how long it may take, 300 unless given.
set -eu

for tool in qemu-system-x86_64 busybox cpio ip rdma; do
  command -v "$tool" >/dev/null || { echo "verbs guest: $tool is not installed" >&2; exit 77; }
done
[ $# -ne 0 ] || exit 0
kernel=$1 modules=$2
shift 2
program=$(printf "'%s' " "$@") # no argument has a quote in it
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

order="virtio_ring virtio virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci 9pnet 9pnet_virtio netfs fscache 9p
  crc32_generic udp_tunnel ip6_udp_tunnel configfs ib_core ib_uverbs ib_cm iw_cm rdma_cm rdma_ucm rdma_rxe veth"
mkdir -p "$work/root/bin" "$work/root/modules" "$work/root/proc" "$work/root/sys" "$work/root/dev" "$work/root/host"
cp "$(command -v busybox)" "$work/root/bin/busybox"
for module in $order; do
  file=$(find "$modules" -name "$module.ko" | head -n 1)
  [ -n "$file" ] || { echo "verbs guest: no module $module below the folder of modules" >&2; exit 77; }
  cp "$file" "$work/root/modules/"
done

cat >"$work/root/init" <<END
#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
for module in $(echo $order); do insmod /modules/\$module.ko || echo "no \$module"; done
mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose host /host || echo "no host"
mount -t proc proc /host/proc; mount -t sysfs sys /host/sys; mount --bind /dev /host/dev
mkdir -p /host/dev/shm; mount -t tmpfs shm /host/dev/shm
cat >/host/dev/inside <<'INSIDE'
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
ip link set lo up
ip link add veth0 address 02:00:00:00:00:01 mtu 4500 type veth peer name veth1 address 02:00:00:00:00:02 mtu 4500
ip addr add 10.0.0.1/24 dev veth0; ip addr add 10.0.0.2/24 dev veth1
ip link set veth0 up; ip link set veth1 up
for dev in all veth0 veth1; do echo 0 >/proc/sys/net/ipv4/conf/\$dev/rp_filter; echo 1 >/proc/sys/net/ipv4/conf/\$dev/accept_local; done
ip neigh replace 10.0.0.2 lladdr 02:00:00:00:00:02 dev veth0 nud permanent
ip neigh replace 10.0.0.1 lladdr 02:00:00:00:00:01 dev veth1 nud permanent
rdma link add rxe0 type rxe netdev veth0
rdma link add rxe1 type rxe netdev veth1
ip route add 10.0.0.2/32 dev veth0 src 10.0.0.1 table 102; ip route add 10.0.0.1/32 dev veth1 src 10.0.0.2 table 101
ip rule add pref 10 iif lo to 10.0.0.2 from 10.0.0.1 lookup 102; ip rule add pref 11 iif lo to 10.0.0.1 from 10.0.0.2 lookup 101
ip rule add pref 100 lookup local; ip rule del pref 0
ulimit -l unlimited
$program rxe0 rxe1
echo "verbs guest: exit \$?"
INSIDE
chroot /host /bin/sh /dev/inside
poweroff -f
END
chmod +x "$work/root/init"
(cd "$work/root" && find . | cpio --quiet -o -H newc | gzip -1) >"$work/initrd.gz"

timeout "${EP_GUEST_SECONDS:-300}" qemu-system-x86_64 -accel tcg,thread=multi -cpu max -smp 2 -M q35 -m 1024 -nographic -nodefaults -serial stdio -no-reboot \
  -fsdev local,id=f0,path=/,security_model=none,readonly=on,multidevs=remap -device virtio-9p-pci,fsdev=f0,mount_tag=host \
  -kernel "$kernel" -initrd "$work/initrd.gz" \
  -append 'console=ttyS0 panic=-1 quiet nokaslr mitigations=off tsc=reliable rdinit=/init' </dev/null | tr -d '\r' | tee "$work/log"
code=$(sed -n 's/^verbs guest: exit //p' "$work/log" | tail -n 1)
[ -n "$code" ] || { echo "verbs guest: the program never ended" >&2; exit 1; }
exit "$code"
