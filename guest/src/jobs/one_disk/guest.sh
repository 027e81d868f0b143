# What both guests of the job can be ordered to do.

# Waits until a command succeeds: until_so SECONDS COMMAND.
until_so() {
    read -r up rest </proc/uptime
    limit=$((${up%.*} + $1))
    until eval "$2" >/tmp/last 2>&1; do
        read -r up rest </proc/uptime
        if [ "${up%.*}" -ge $limit ]; then
            echo "not after $1 s: $2"
            cat /tmp/last
            return 1
        fi
        sleep 0.3
    done
}

# Whether the list says of a host whether it is alive.
alive() {
    cbdctrl --json host-list | tr -d ' \n' | grep -q "\"hostname\":\"$1\",\"alive\":$2"
}

both_alive() {
    alive a true && alive b true
}

begin() {
    cbdd --state-dir /state/cbd >>/tmp/cbdd.log 2>&1 4<&- &
    daemon=$!
    until_so 120 'cbdctrl tp-list'
}

kill_daemon() {
    kill -9 $daemon
    wait $daemon
    true
}

# Moves the backend to a host. A guest that gets no processor for seconds is a host that does not answer: then nothing
# was moved, and the command is given again.
move_to() {
    for attempt in 1 2 3; do
        if cbdctrl backend-move --backend 0 --to $1 >/tmp/moved 2>&1; then return; fi
        echo "attempt $attempt: $(cat /tmp/moved)"
        grep -q host-list /tmp/moved || return 1
        sleep 5
        until_so 120 both_alive || return 1
    done
    return 1
}

# The file number N: it says which one it is in each line.
content() {
    yes "copy $1" | head -c 131072
}

# Writes a file that the next seven do not replace, notes its number when it is durable, and reads it.
copies() {
    number=$1
    while [ ! -e /tmp/enough ]; do
        place=/fs/$((number % 8))
        if ! content $number | dd of=/fs/next bs=64k conv=fsync 2>/dev/null; then
            echo "copy $number was not written" >>/tmp/failures
            return 1
        fi
        mv /fs/next $place
        sync
        echo "note $number"
        echo 3 >/proc/sys/vm/drop_caches
        if ! content $number | cmp - $place >>/tmp/failures 2>&1; then
            echo "copy $number differs" >>/tmp/failures
            return 1
        fi
        number=$((number + 1))
        sleep 0.5
    done
}

# Checks the files in a folder of which all up to a number have been noted.
check_copies() {
    for slot in 0 1 2 3 4 5 6 7; do
        if [ $2 -lt $((slot + 8)) ]; then continue; fi
        least=$(($2 - ($2 - slot) % 8))
        read -r word found <"$1/$slot"
        if [ "$word" != copy ] || [ "$found" -lt $least ] || [ $((found % 8)) != $slot ]; then
            echo "file $slot is not copy $least or a later one: $word $found"
            return 1
        fi
        content "$found" | cmp - "$1/$slot" || return 1
    done
}

# Writes a file in random order and reads all of it back, again and again.
verified() {
    round=0
    while [ ! -e /tmp/enough ]; do
        round=$((round + 1))
        if ! fio --name=verify --filename=/fs/file --size=16M --bsrange=4k-64k --bs_unaligned=0 --rw=randwrite \
            --ioengine=io_uring --iodepth=8 --direct=1 --verify=crc32c --verify_fatal=1 --verify_state_save=0 \
            --fsync=64 --randseed=$round$$ >/tmp/fio 2>&1; then
            cat /tmp/fio >>/tmp/failures
            return 1
        fi
        echo $round >/tmp/rounds
    done
}

# How many requests the block device has completed.
completed() {
    read -r reads b c d writes rest <"/sys/block/$block/stat"
    echo $((reads + writes))
}

# The longest time, in hundredths of a second, in which requests were in flight and none was completed.
watch_pauses() {
    last=0
    since=0
    while [ ! -e /tmp/enough ]; do
        sleep 0.1
        read -r up rest </proc/uptime
        read -r reads b c d writes f g h flying rest <"/sys/block/$block/stat"
        now=${up%.*}${up#*.}
        if [ $((reads + writes)) != $last ] || [ "$flying" = 0 ]; then
            last=$((reads + writes))
            since=$now
        fi
        read -r longest </tmp/pause
        if [ $((now - since)) -gt "${longest:-0}" ]; then echo $((now - since)) >/tmp/pause; fi
    done
}

# Uses the file system on the block device; the files that it copies are numbered from a number on.
start_load() {
    block=$(basename "$(readlink -f /dev/cbd0)")
    rm -f /tmp/enough
    echo 0 >/tmp/pause
    echo 0 >/tmp/rounds
    : >/tmp/failures
    verified &
    verifying=$!
    copies $1 &
    copying=$!
    watch_pauses &
}

works() {
    cat /tmp/failures
    [ ! -s /tmp/failures ] && kill -0 $verifying && kill -0 $copying
}

# Waits until so many more requests have been completed.
progress() {
    before=$(completed)
    until_so 180 "[ \$(completed) -ge $((before + $1)) ]" && works
}

end_load() {
    touch /tmp/enough
    wait $verifying && wait $copying
    ended=$?
    cat /tmp/failures
    umount /fs && e2fsck -f -n /dev/cbd0 && return $ended
}

checksum() {
    dd if=$1 bs=1M iflag=direct 2>/dev/null | md5sum
}

no_kernel_errors() {
    ! dmesg | grep -e 'I/O error' -e 'EXT4-fs error' -e 'blocked for more' -e WARNING
}

# What is known when something has gone wrong.
report() {
    timeout 20 cbdctrl host-list
    timeout 20 cbdctrl backend-list --all
    timeout 20 cbdctrl dev-list
    tail -n 5 /tmp/fio
    dmesg | tail -n 10
}

mkdir -p /state
touch /tmp/cbdd.log
tail -f /tmp/cbdd.log >&2 4<&- &
