# Run by nbdsh: CBD_URI says where the server is: 64 MiB, of which 4 KiB at 1 MiB are damaged, and a sector at 40 MiB is
# unreadable.
import os
size, mib = 64 << 20, 1 << 20
h.add_meta_context('base:allocation')
h.add_meta_context('cbd:verify')
h.connect_uri(os.environ['CBD_URI'])
assert h.can_meta_context('cbd:verify') and not h.can_meta_context('cbd:state')

seen = {}
def extent(context, offset, entries, error):
    seen[context] = (offset, entries)
h.block_status(size, 0, extent)
assert seen['base:allocation'] == (0, [size, 0]), seen
assert seen['cbd:verify'] == (0, [mib, 1, 4096, 3, 15 * mib - 4096, 1]), seen
h.block_status(size - 512, 512, extent, nbd.CMD_FLAG_REQ_ONE)
assert seen['cbd:verify'] == (512, [mib - 512, 1]), seen
h.block_status(4096, 40 * mib - 512, extent)
assert seen['cbd:verify'] == (40 * mib - 512, [512, 1, 512, 5, 3072, 1]), seen
h.shutdown()
print('all is well')
