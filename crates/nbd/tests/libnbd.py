# Run by nbdsh: `h` is a handle that is not connected. CBD_URI says where the server is: 64 MiB of memory, the first
# MiB dirty, the second clean in the cache, the last a hole.
import os
uri = os.environ['CBD_URI']
size = 64 << 20
h.set_export_name('disk')
h.add_meta_context('base:allocation')
h.add_meta_context('cbd:state')
h.connect_uri(uri)
assert h.get_size() == size
assert h.get_protocol() == 'newstyle-fixed' and h.get_structured_replies_negotiated()
for can in (h.can_flush, h.can_fua, h.can_trim, h.can_zero, h.can_fast_zero, h.can_cache, h.can_df, h.can_multi_conn):
    assert can(), can
assert not h.is_read_only() and not h.is_rotational()
assert h.get_block_size(nbd.SIZE_MINIMUM) == 512
assert h.get_block_size(nbd.SIZE_PREFERRED) == 4096
assert h.get_block_size(nbd.SIZE_MAXIMUM) == 32 << 20
assert h.can_meta_context('base:allocation') and h.can_meta_context('cbd:state')

data = os.urandom(3 << 20)
h.pwrite(data, 512, nbd.CMD_FLAG_FUA)
assert h.pread(len(data), 512) == data
pieces = []
def piece(data, offset, status, error):
    pieces.append((offset, status, bytes(data)))
h.pread_structured(len(data), 512, piece, nbd.CMD_FLAG_DF)
assert pieces == [(512, nbd.READ_DATA, data)]
h.zero(4096, 512, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FAST_ZERO | nbd.CMD_FLAG_FUA)
h.trim(4096, 8192, nbd.CMD_FLAG_FUA)
h.cache(size, 0)
h.flush()
want = bytearray(data)
want[0:4096] = bytes(4096)
want[8192-512:12288-512] = bytes(4096)
assert h.pread(len(data), 512) == bytes(want)

seen = {}
def extent(context, offset, entries, error):
    seen[context] = (offset, entries)
h.block_status(size, 0, extent)
mib = 1 << 20
assert seen['base:allocation'] == (0, [63 * mib, 0, mib, 3]), seen
assert seen['cbd:state'] == (0, [mib, 3, mib, 1, 62 * mib, 0]), seen
h.block_status(size - 4096, 4096, extent, nbd.CMD_FLAG_REQ_ONE)
assert seen['cbd:state'] == (4096, [mib - 4096, 3]), seen

def fails(error, call, *arguments):
    try:
        call(*arguments)
    except nbd.Error as caught:
        assert caught.errno == error, (caught.errno, error)
    else:
        raise AssertionError('it did not fail')
h.set_strict_mode(0)
fails('EINVAL', h.pread, 512, size)
fails('ENOSPC', h.pwrite, bytes(512), size)
fails('EINVAL', h.pread, 100, 0)
fails('EINVAL', h.pwrite, bytes(100), 512)
fails('EINVAL', h.pread, 512, 0, 1 << 10)
h.flush()

# Two connections are one device.
other = nbd.NBD()
other.connect_uri(uri)
other.pwrite(bytes([7]) * 4096, 8 << 20)
h.flush()
assert h.pread(4096, 8 << 20) == bytes([7]) * 4096
other.shutdown()

# The oldest handshake, simple replies, a wrong name, and a list.
old = nbd.NBD()
old.set_request_structured_replies(False)
old.set_handshake_flags(0)
old.set_export_name('disk')
old.connect_uri(uri)
assert old.pread(4096, 8 << 20) == bytes([7]) * 4096
old.shutdown()
wrong = nbd.NBD()
fails('ENOENT', wrong.connect_uri, uri.replace('disk', 'other'))
asking = nbd.NBD()
asking.set_opt_mode(True)
asking.connect_uri(uri)
exports, contexts = [], []
asking.opt_list(lambda name, text: exports.append((name, text)))
assert exports == [('disk', 'a test')], exports
asking.opt_list_meta_context(contexts.append)
assert sorted(contexts) == ['base:allocation', 'cbd:state'], contexts
asking.set_full_info(True)
asking.opt_info()
assert asking.get_export_description() == 'a test' and asking.get_canonical_export_name() == 'disk'
asking.opt_abort()

# Many in flight.
left = []
for number in range(64):
    buffer = nbd.Buffer.from_bytearray(bytearray([number]) * 65536)
    left.append(h.aio_pwrite(buffer, number * 65536))
while left:
    h.poll(1000)
    left = [cookie for cookie in left if not h.aio_command_completed(cookie)]
for number in range(64):
    assert h.pread(65536, number * 65536) == bytes([number]) * 65536
h.shutdown()
print('all is well')
