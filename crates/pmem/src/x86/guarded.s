# Every access to a region: copies, checksums and write-backs that survive a failing memory.
#
# All routines here are leaves: they use no stack, save nothing, and touch only caller-saved registers (System V). So at every instruction between `cbd_pmem_guarded_begin` and
# `cbd_pmem_guarded_end` the return address is at [rsp], and a signal handler can end the routine by
# setting rax = 1, rdx = the address that failed, rip = `cbd_pmem_guarded_landing`.
#
# Arguments: rdi destination, rsi source, rdx count, rcx seed, r8 folding keys.
# Result:    rax 0 on success; rdx then holds the checksum, where one is computed.
#
# Each source byte is loaded once, and the checksum is computed from the register that is stored: another
# process may change the source meanwhile.

    .pushsection .text.cbd_pmem_guarded, "ax", @progbits
    .p2align 6
    .globl cbd_pmem_guarded_begin
    .hidden cbd_pmem_guarded_begin
cbd_pmem_guarded_begin:

    .macro routine name
    .p2align 5
    .globl cbd_pmem_\name
    .hidden cbd_pmem_\name
    .type cbd_pmem_\name, @function
cbd_pmem_\name:
    .endm

# Stores one register at [rdi + offset], with one of five methods:
#   nt                           past the caches; the destination is aligned
#   clwb, clflushopt, clflush    through the caches, written back by `back`
#   plain                        through the caches, at any alignment, not written back
    .macro put_zmm way, offset, register
    .ifc \way, nt
    vmovntdq zmmword ptr [rdi + \offset], \register
    .else
    vmovdqu64 zmmword ptr [rdi + \offset], \register
    .endif
    .endm

    .macro put_ymm way, offset, register
    .ifc \way, nt
    vmovntdq ymmword ptr [rdi + \offset], \register
    .else
    vmovdqu ymmword ptr [rdi + \offset], \register
    .endif
    .endm

    .macro put_xmm way, offset, register
    .ifc \way, nt
    movntdq xmmword ptr [rdi + \offset], \register
    .else
    movdqu xmmword ptr [rdi + \offset], \register
    .endif
    .endm

# Writes the line at [rdi + offset] back if the method requires it.
    .macro back way, offset
    .ifc \way, clwb
    clwb byte ptr [rdi + \offset]
    .endif
    .ifc \way, clflushopt
    clflushopt byte ptr [rdi + \offset]
    .endif
    .ifc \way, clflush
    clflush byte ptr [rdi + \offset]
    .endif
    .endm

# ---- Copies of whole lines of 64 bytes; rdx lines, at least one -------------------------------------------

    .macro line_zmm way, offset
    vmovdqu64 zmm0, zmmword ptr [rsi + \offset]
    put_zmm \way, \offset, zmm0
    back \way, \offset
    .endm

    .macro line_ymm way, offset
    vmovdqu ymm0, ymmword ptr [rsi + \offset]
    vmovdqu ymm1, ymmword ptr [rsi + \offset + 32]
    put_ymm \way, \offset, ymm0
    put_ymm \way, \offset + 32, ymm1
    back \way, \offset
    .endm

    .macro line_xmm way, offset
    movdqu xmm0, xmmword ptr [rsi + \offset]
    movdqu xmm1, xmmword ptr [rsi + \offset + 16]
    movdqu xmm2, xmmword ptr [rsi + \offset + 32]
    movdqu xmm3, xmmword ptr [rsi + \offset + 48]
    put_xmm \way, \offset, xmm0
    put_xmm \way, \offset + 16, xmm1
    put_xmm \way, \offset + 32, xmm2
    put_xmm \way, \offset + 48, xmm3
    back \way, \offset
    .endm


    .macro clear width
    .ifc \width, zmm
    vzeroupper
    .endif
    .ifc \width, ymm
    vzeroupper
    .endif
    .endm

    .macro copy_lines name, width, way
    routine \name
    sub rdx, 4
    jb .L\name\()_rest
    .p2align 5
.L\name\()_four:
    line_\width \way, 0
    line_\width \way, 64
    line_\width \way, 128
    line_\width \way, 192
    add rsi, 256
    add rdi, 256
    sub rdx, 4
    jae .L\name\()_four
.L\name\()_rest:
    add rdx, 4
    jz .L\name\()_done
.L\name\()_one:
    line_\width \way, 0
    add rsi, 64
    add rdi, 64
    dec rdx
    jnz .L\name\()_one
.L\name\()_done:
    clear \width
    xor eax, eax
    ret
    .endm

    copy_lines store_nt_zmm, zmm, nt
    copy_lines store_nt_ymm, ymm, nt
    copy_lines store_nt_xmm, xmm, nt
    copy_lines store_clwb_zmm, zmm, clwb
    copy_lines store_clwb_xmm, xmm, clwb
    copy_lines store_clflushopt_xmm, xmm, clflushopt
    copy_lines store_clflush_xmm, xmm, clflush

    routine store_movdir64b
.Lmovdir64b_one:
    movdir64b rdi, zmmword ptr [rsi]
    add rsi, 64
    add rdi, 64
    dec rdx
    jnz .Lmovdir64b_one
    xor eax, eax
    ret

# ---- Copies with CRC32C, 256 bytes at a time; rdx times 256 bytes, at least one ---------------------------
#
# The message is a polynomial over GF(2). Four accumulators hold what was read so far, modulo the CRC's
# polynomial but not reduced to 32 bits: the accumulators of one step, multiplied by x to the distance of a
# step, are added to the next step's bytes. At the end the four are folded into one, the lanes of the
# last one into the last lane, and two crc32 instructions reduce its 128 bits. The keys are the powers of x
# (see keys.rs): at r8 a step's, at r8 + 64, 128 and 192 those that fold the first three accumulators into
# the fourth, at r8 + 256 those of the lanes.

    .macro fold_zmm accumulator, data, scratch
    vpclmulqdq \scratch, \accumulator, zmm12, 0x00
    vpclmulqdq \accumulator, \accumulator, zmm12, 0x11
    vpternlogq \accumulator, \scratch, \data, 0x96
    .endm

    .macro sum_zmm name, way
    routine \name
    vmovdqa64 zmm12, zmmword ptr [r8]
    vmovd xmm13, ecx
    vmovdqu64 zmm0, zmmword ptr [rsi]
    vmovdqu64 zmm1, zmmword ptr [rsi + 64]
    vmovdqu64 zmm2, zmmword ptr [rsi + 128]
    vmovdqu64 zmm3, zmmword ptr [rsi + 192]
    put_zmm \way, 0, zmm0
    put_zmm \way, 64, zmm1
    put_zmm \way, 128, zmm2
    put_zmm \way, 192, zmm3
    back \way, 0
    back \way, 64
    back \way, 128
    back \way, 192
    vpxord zmm0, zmm0, zmm13
    dec rdx
    jz .L\name\()_reduce
    .p2align 5
.L\name\()_step:
    add rsi, 256
    add rdi, 256
    vmovdqu64 zmm4, zmmword ptr [rsi]
    vmovdqu64 zmm5, zmmword ptr [rsi + 64]
    vmovdqu64 zmm6, zmmword ptr [rsi + 128]
    vmovdqu64 zmm7, zmmword ptr [rsi + 192]
    put_zmm \way, 0, zmm4
    put_zmm \way, 64, zmm5
    put_zmm \way, 128, zmm6
    put_zmm \way, 192, zmm7
    back \way, 0
    back \way, 64
    back \way, 128
    back \way, 192
    fold_zmm zmm0, zmm4, zmm8
    fold_zmm zmm1, zmm5, zmm9
    fold_zmm zmm2, zmm6, zmm10
    fold_zmm zmm3, zmm7, zmm11
    dec rdx
    jnz .L\name\()_step
.L\name\()_reduce:
    vpclmulqdq zmm4, zmm0, zmmword ptr [r8 + 64], 0x00
    vpclmulqdq zmm5, zmm0, zmmword ptr [r8 + 64], 0x11
    vpclmulqdq zmm6, zmm1, zmmword ptr [r8 + 128], 0x00
    vpclmulqdq zmm7, zmm1, zmmword ptr [r8 + 128], 0x11
    vpclmulqdq zmm8, zmm2, zmmword ptr [r8 + 192], 0x00
    vpclmulqdq zmm9, zmm2, zmmword ptr [r8 + 192], 0x11
    vpternlogq zmm3, zmm4, zmm5, 0x96
    vpternlogq zmm6, zmm7, zmm8, 0x96
    vpternlogq zmm3, zmm6, zmm9, 0x96
    vpclmulqdq zmm4, zmm3, zmmword ptr [r8 + 256], 0x00
    vpclmulqdq zmm5, zmm3, zmmword ptr [r8 + 256], 0x11
    vpxord zmm4, zmm4, zmm5
    vextracti32x4 xmm5, zmm4, 1
    vextracti32x4 xmm6, zmm4, 2
    vextracti32x4 xmm7, zmm3, 3
    vpxor xmm4, xmm4, xmm5
    vpxor xmm6, xmm6, xmm7
    vpxor xmm4, xmm4, xmm6
    vmovq rax, xmm4
    vpextrq rcx, xmm4, 1
    xor edx, edx
    crc32 rdx, rax
    crc32 rdx, rcx
    vzeroupper
    xor eax, eax
    ret
    .endm

    sum_zmm sum_nt_zmm, nt
    sum_zmm sum_clwb_zmm, clwb
    sum_zmm sum_plain_zmm, plain

# The same with 128-bit registers: four accumulators of 16 bytes, a step of 64.
    .macro fold_xmm accumulator, data, scratch
    movdqa \scratch, \accumulator
    pclmulqdq \scratch, xmm12, 0x00
    pclmulqdq \accumulator, xmm12, 0x11
    pxor \accumulator, \scratch
    pxor \accumulator, \data
    .endm

    .macro sum_xmm name, way
    routine \name
    shl rdx, 2
    movdqa xmm12, xmmword ptr [r8 + 192]
    movd xmm13, ecx
    movdqu xmm0, xmmword ptr [rsi]
    movdqu xmm1, xmmword ptr [rsi + 16]
    movdqu xmm2, xmmword ptr [rsi + 32]
    movdqu xmm3, xmmword ptr [rsi + 48]
    put_xmm \way, 0, xmm0
    put_xmm \way, 16, xmm1
    put_xmm \way, 32, xmm2
    put_xmm \way, 48, xmm3
    back \way, 0
    pxor xmm0, xmm13
    dec rdx
    .p2align 5
.L\name\()_step:
    add rsi, 64
    add rdi, 64
    movdqu xmm4, xmmword ptr [rsi]
    movdqu xmm5, xmmword ptr [rsi + 16]
    movdqu xmm6, xmmword ptr [rsi + 32]
    movdqu xmm7, xmmword ptr [rsi + 48]
    put_xmm \way, 0, xmm4
    put_xmm \way, 16, xmm5
    put_xmm \way, 32, xmm6
    put_xmm \way, 48, xmm7
    back \way, 0
    fold_xmm xmm0, xmm4, xmm8
    fold_xmm xmm1, xmm5, xmm9
    fold_xmm xmm2, xmm6, xmm10
    fold_xmm xmm3, xmm7, xmm11
    dec rdx
    jnz .L\name\()_step
    movdqa xmm4, xmm0
    pclmulqdq xmm4, xmmword ptr [r8 + 256], 0x00
    pclmulqdq xmm0, xmmword ptr [r8 + 256], 0x11
    movdqa xmm5, xmm1
    pclmulqdq xmm5, xmmword ptr [r8 + 272], 0x00
    pclmulqdq xmm1, xmmword ptr [r8 + 272], 0x11
    movdqa xmm6, xmm2
    pclmulqdq xmm6, xmmword ptr [r8 + 288], 0x00
    pclmulqdq xmm2, xmmword ptr [r8 + 288], 0x11
    pxor xmm0, xmm4
    pxor xmm1, xmm5
    pxor xmm2, xmm6
    pxor xmm3, xmm0
    pxor xmm1, xmm2
    pxor xmm3, xmm1
    movq rax, xmm3
    psrldq xmm3, 8
    movq rcx, xmm3
    xor edx, edx
    crc32 rdx, rax
    crc32 rdx, rcx
    xor eax, eax
    ret
    .endm

    sum_xmm sum_nt_xmm, nt
    sum_xmm sum_clwb_xmm, clwb
    sum_xmm sum_clflushopt_xmm, clflushopt
    sum_xmm sum_clflush_xmm, clflush
    sum_xmm sum_plain_xmm, plain

# ---- Any number of bytes at any alignment, through the caches, not written back; rdx bytes ----------------

    routine bytes_zmm
    sub rdx, 256
    jb .Lbytes_zmm_lines
    .p2align 5
.Lbytes_zmm_four:
    vmovdqu64 zmm0, zmmword ptr [rsi]
    vmovdqu64 zmm1, zmmword ptr [rsi + 64]
    vmovdqu64 zmm2, zmmword ptr [rsi + 128]
    vmovdqu64 zmm3, zmmword ptr [rsi + 192]
    vmovdqu64 zmmword ptr [rdi], zmm0
    vmovdqu64 zmmword ptr [rdi + 64], zmm1
    vmovdqu64 zmmword ptr [rdi + 128], zmm2
    vmovdqu64 zmmword ptr [rdi + 192], zmm3
    add rsi, 256
    add rdi, 256
    sub rdx, 256
    jae .Lbytes_zmm_four
.Lbytes_zmm_lines:
    add rdx, 256
    sub rdx, 64
    jb .Lbytes_zmm_rest
.Lbytes_zmm_one:
    vmovdqu64 zmm0, zmmword ptr [rsi]
    vmovdqu64 zmmword ptr [rdi], zmm0
    add rsi, 64
    add rdi, 64
    sub rdx, 64
    jae .Lbytes_zmm_one
.Lbytes_zmm_rest:
    add rdx, 64
    jz .Lbytes_zmm_done
    mov rax, -1
    bzhi rax, rax, rdx
    kmovq k1, rax
    vmovdqu8 zmm0 {k1} {z}, zmmword ptr [rsi]
    vmovdqu8 zmmword ptr [rdi] {k1}, zmm0
.Lbytes_zmm_done:
    vzeroupper
    xor eax, eax
    ret

    routine bytes_movsb
    mov rcx, rdx
    rep movsb byte ptr [rdi], byte ptr [rsi]
    xor eax, eax
    ret

# The same with CRC32C, eight bytes at a time: for short pieces, odd alignments and tails.
    routine sum_bytes
    mov r9d, ecx
    sub rdx, 8
    jb .Lsum_bytes_rest
.Lsum_bytes_eight:
    mov rax, qword ptr [rsi]
    mov qword ptr [rdi], rax
    crc32 r9, rax
    add rsi, 8
    add rdi, 8
    sub rdx, 8
    jae .Lsum_bytes_eight
.Lsum_bytes_rest:
    add rdx, 8
    jz .Lsum_bytes_done
.Lsum_bytes_one:
    mov al, byte ptr [rsi]
    mov byte ptr [rdi], al
    crc32 r9d, al
    inc rsi
    inc rdi
    dec rdx
    jnz .Lsum_bytes_one
.Lsum_bytes_done:
    mov edx, r9d
    xor eax, eax
    ret

# ---- Write-back of rdx lines from rdi; no byte changes ----------------------------------------------------

    .macro back_lines name, way
    routine \name
.L\name\()_one:
    back \way, 0
    add rdi, 64
    dec rdx
    jnz .L\name\()_one
    xor eax, eax
    ret
    .endm

    back_lines back_clwb, clwb
    back_lines back_clflushopt, clflushopt
    back_lines back_clflush, clflush

    .p2align 4
    .globl cbd_pmem_guarded_end
    .hidden cbd_pmem_guarded_end
cbd_pmem_guarded_end:

# The end of a routine that accessed failing memory: outside the range, so that it cannot be entered twice.
    .globl cbd_pmem_guarded_landing
    .hidden cbd_pmem_guarded_landing
cbd_pmem_guarded_landing:
    ret
    .popsection
    .irp name, routine, put_zmm, put_ymm, put_xmm, back, line_zmm, line_ymm, line_xmm, clear, copy_lines
    .purgem \name
    .endr
    .irp name, fold_zmm, sum_zmm, fold_xmm, sum_xmm, back_lines
    .purgem \name
    .endr
