//! System calls that a sandbox refuses.

/// Makes a system call fail with EPERM for the calling thread and those that it starts, as a container does.
pub fn forbid(call: libc::c_long) {
    let statement = |code: u32, k: u32, jump: u8| libc::sock_filter { code: code as u16, jt: 0, jf: jump, k };
    let mut filter = [
        // Load the number of the call; if it is the forbidden one, return EPERM, else allow it.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, call as u32, 1),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32, 0),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: both calls take numbers and a program that outlives them; they affect this thread and its children only.
    let result = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            | libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
    };
    assert_eq!(result, 0, "a filter");
}
