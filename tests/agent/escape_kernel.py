"""The second part of the table in `escape_table.py`: processes, sockets and the kernel itself."""

from __future__ import annotations

from escape_table import Attempt, opens, py, unix

PROCESSES = [
    Attempt("kill a process outside", "kill -9 $V"),
    Attempt("stop a process outside", "kill -STOP $V"),
    Attempt("signal by group", "kill -9 -- -$V"),
    py("signal by pidfd", "syscall(424, syscall(434, V, 0), 9, None, 0)"),
    py("descriptor of a process outside", "syscall(438, syscall(434, V, 0), 2, 0); won()", "root"),
    py("ptrace", "check(libc.ptrace(16, V, 0, 0)); won(); libc.ptrace(17, V, 0, 0)", "root"),
    Attempt("gdb", "gdb -nx -batch -p $V -ex 'p 1' 2>&1 | grep -q '= 1' && grep -z SECRET /proc/$V/environ", None),
    py("process_vm_readv", """
start, end = secret(); data = ctypes.create_string_buffer(end - start)
class Vector(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
mine, theirs = Vector(ctypes.addressof(data), end - start), Vector(start, end - start)
check(libc.process_vm_readv(V, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)); print(data.raw)""", "root"),
    py("/proc/PID/mem", "s, e = secret(); f = open(f'/proc/{V}/mem', 'rb'); f.seek(s); print(f.read(e - s))", "root"),
    Attempt("/proc/PID/environ", "cat /proc/$V/environ"),
    Attempt("all environments", "cat /proc/[0-9]*/environ | tr '\\0' '\\n' | grep SECRET"),
    Attempt("all command lines", "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep ^SECRET"),
    Attempt("enter its namespaces", "nsenter -t $V -m -n sh -c \"echo x > $O/file\"", "root"),
    Attempt("priority of a process outside", "renice -n 7 -p $V"),
    Attempt("limits of a process outside", "prlimit --pid $V --nofile=77:77"),
    Attempt("OOM score of a process outside", "echo 777 > /proc/$V/oom_score_adj"),
    py("shared memory of another", """
libc.shmat.restype = ctypes.c_void_p
at = libc.shmat(check(libc.shmget(int(os.environ["KEY"]), 0, 0)), None, 0o10000); print(ctypes.string_at(at))"""),
    py("shared memory left over", "check(libc.shmget(int(os.environ['KEY']) + 1, 4096, 0o1600))"),
]  # fmt: skip

SOCKETS = [
    Attempt("TCP to the host", "exec 3<>/dev/tcp/127.0.0.1/$TCP; echo x >&3"),
    py("TCP over IPv6", "socket.create_connection(('::1', int(os.environ['TCP6'])), 2)"),
    Attempt("UDP to the host", "echo x > /dev/udp/127.0.0.1/$UDP"),
    py("TCP fast open", "socket.socket().sendto(b'x', 0x20000000, ('127.0.0.1', int(os.environ['TCP'])))"),
    py("TCP by the host's address", """
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(("192.0.2.1", 9)); won()""", None),
    Attempt("DNS", "getent ahosts localhost.example.net && won", None),
    py("IPv6 multicast",
       "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).sendto(b'x', ('ff02::1%eth0', 9)); won()", None),
    py("raw socket", "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); won()", "root"),
    py("packet socket", "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); won()", "root"),
    py("vsock", "socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM); won()", None),
    py("AF_ALG", "socket.socket(38, socket.SOCK_SEQPACKET); won()", None),
    Attempt("network settings", "ip link add dummy7 type dummy && won; ip link set lo mtu 1400 && won", None),
    unix("Unix socket, as of docker or D-Bus", "f'{O}/sock'"),
    unix("Unix socket by descriptor", "f'/proc/self/fd/{os.open(O, os.O_PATH)}/sock'"),
    unix("Unix socket of datagrams", "f'{O}/datagrams'", "SOCK_DGRAM"),
    py("a pair's end sent elsewhere",
       "a, b = socket.socketpair(type=socket.SOCK_DGRAM); a.sendto(b'x', f'{O}/datagrams')", None),
    unix("abstract Unix socket, as of X11", "f'\\0{T}'"),
    Attempt("ssh-agent", "SSH_AUTH_SOCK=$O/sock timeout 5 ssh-add -l"),
    Attempt("curl to docker.sock", "timeout 5 curl -s --unix-socket $O/sock http://localhost/info"),
    Attempt("tmux", "timeout 5 tmux -S $O/sock new-session -d 'true'"),
    Attempt("busctl and dbus-send", "export DBUS_SESSION_BUS_ADDRESS=unix:path=$O/sock; timeout 1 systemctl --user; "
            "timeout 1 busctl --user list; timeout 1 dbus-send --session /x x.x", None),
    py("io_uring", "syscall(425, 1, ctypes.create_string_buffer(256)); won()", None),
    py("a 64-bit call by its x32 number", "syscall(0x40000000 + 41, 1, 1, 0); won()", None),
    py("keyring", "syscall(int(os.environ['KEYCTL']), 0, -4, 0); won()"),
]  # fmt: skip

KERNEL = [
    Attempt("bind mount", "mkdir m; mount --bind m $O && won", None),
    Attempt("remount", "mount -o remount,bind,rw / && won; mount -o remount,bind,rw $R && won", None),
    Attempt("umount", "umount -l $W && won; umount -l /proc && won; umount -l / && won", None),
    Attempt("unshare -Urm", "unshare -Urm sh -c \"mount -o remount,bind,rw / && echo x > $O/file; echo wo\"n"),
    Attempt("unshare -m", "unshare -m true && won", "root"),
    Attempt("chroot", "chroot / true && won", "root"),
    py("pivot_root", "syscall({'x86_64': 155}.get(os.uname().machine, 41), b'.', b'.'); won()", None),
    py("setns", "check(libc.setns(os.open(f'/proc/{V}/ns/net', 0), 0)); won()", "root"),
    py("a user namespace by clone", "check(libc.unshare(0x10000000)); won()"),
    py("open_tree", "syscall(428, -100, O.encode(), 1); won()", "root"),
    py("fsopen", "syscall(430, b'tmpfs', 0); won()", "root"),
    py("mount_setattr", "syscall(442, -100, O.encode(), 0, struct.pack('QQQQ', 0, 1, 0, 0), 32); won()", None),
    Attempt("a fresh /proc", "mkdir m; mount -t proc proc m && won; mount -t sysfs s m && won", None),
    Attempt("host's name", "hostname $T || echo $T > /proc/sys/kernel/hostname", None),
    Attempt("clock", "date -s @$(date +%s) && won", None),
    opens("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/core_pattern"),
    opens("/proc/sys, the rest",
          "/proc/sys/kernel/modprobe /proc/sys/vm/drop_caches /proc/sys/fs/binfmt_misc/register"),
    opens("/proc/sysrq-trigger", "/proc/sysrq-trigger", None),
    opens("/sys", "$(find /sys/kernel /sys/module -maxdepth 3 -type f -perm -200 2> /dev/null | head -n 40)"),
    Attempt("cgroup", "for d in /sys/fs/cgroup /sys/fs/cgroup/*/; do (exec 3>>$d/cgroup.procs) && won; "
            "(exec 3>>$d/release_agent) && won; mkdir $d/$T && won; rmdir $d/$T; done", "root"),
    opens("memory and kernel log", "/dev/mem /dev/kmem /dev/kmsg /dev/port /proc/kcore"),
    opens("other devices", "/dev/net/tun /dev/loop-control /dev/fuse /dev/kvm /dev/uinput /dev/loop0"),
    Attempt("disks", "for d in /dev/[svx]d[a-z]* /dev/nvme*n1; do head -c 1 $d > x && [ -s x ] && won; done", None),
    Attempt("device file of one's own", "mknod d b 7 0 && won; mknod c c 1 1 && won; mknod k c 1 11 && won", "root"),
    Attempt("terminals", "for t in $PTS; do echo x > $t; done"),
    py("typing at the terminal", "fcntl.ioctl(os.open('/dev/tty', os.O_RDWR), 0x5412, b'x'); won()", None),
    Attempt("setuid file", "cp /bin/true s; chmod u+s s"),
    Attempt("setgid file", "cp /bin/true s; chmod g+s s"),
    py("setuid file, made as such", "os.umask(0); os.close(os.open('s', os.O_CREAT | os.O_WRONLY, 0o4755))"),
    py("setuid file by descriptor", "os.fchmod(os.open('s', os.O_CREAT | os.O_WRONLY, 0o755), 0o6755)"),
    py("setuid file by fchmodat2", "open('s', 'w'); syscall(452, -100, b's', 0o4755, 0)", None),
    py("setuid file by mknod", "os.mknod('s', 0o104755)"),
    py("setuid file by openat2", "syscall(437, -100, b's', struct.pack('QQQ', 0o101, 0o4755, 0), 24)", None),
    py("file capabilities",
       "open('s', 'w'); os.setxattr('s', 'security.capability', "
       "struct.pack('<5I', 0x2000001, 128, 0, 0, 0)); won()", "root"),
    Attempt("privileges on exec", "grep -q 'NoNewPrivs:.1' /proc/self/status || won"),
    Attempt("capabilities", "grep -q 'CapEff:.0*$' /proc/self/status || won", "root"),
    Attempt("bounding set", "grep -q 'CapBnd:.0*$' /proc/self/status || won"),
    Attempt("FIFO of the host", "timeout 1 sh -c \"echo x > $O/fifo\"", claimed=False),
    Attempt("hard link from outside, made before", "echo x > $W/before", claimed=False),
    Attempt("hard link to a key, made before", "cat $W/before-key", claimed=False),
    Attempt("read what the person may read", "grep -q . $O/file && won", claimed=False),
    Attempt("a repository below the workspace",
            "mkdir -p $W/sub/.git/hooks && : > $W/sub/.git/hooks/x && won", claimed=False),
]  # fmt: skip
