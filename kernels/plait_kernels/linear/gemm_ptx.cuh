// The instructions of a GPU that the GEMMs of 4 bits and FP8 need and C++ has no name for.
//
// Source: PTX ISA; for wgmma "Asynchronous warpgroup level matrix instructions" (fragments, descriptors, swizzle).
#pragma once

__device__ unsigned fma2(unsigned a, unsigned b, unsigned c) {
    unsigned sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

__device__ unsigned bfloat16_pair(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// 1 / (1 + e^-value), more exact than bfloat16 by far.
__device__ float sigmoid(float value) {
    float sum, share;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(sum) : "f"(value * -1.44269504f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(1 + sum));
    return share;
}

__device__ float float_of_half(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// `words` & 0x000F000F | 0x43004300.
__device__ unsigned codes_over_128(unsigned words) {
    unsigned codes;
    asm("lop3.b32 %0, %1, 0x000F000F, 0x43004300, 0xEA;" : "=r"(codes) : "r"(words));
    return codes;
}

__device__ unsigned char* shared_memory() {
    extern __shared__ __align__(1024) unsigned char memory[];
    return memory;
}

__device__ unsigned shared_address(const void* at) { return (unsigned)__cvta_generic_to_shared(at); }

// 16 bytes, or zeros.
__device__ void copy_later(unsigned to, const void* from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0)
                 : "memory");
}

// 4 bytes, or zeros.
__device__ void copy_word_later(unsigned to, const void* from, bool is_there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(is_there ? 4 : 0) : "memory");
}

__device__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LATER> __device__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

// Weights may be read before: no kernel writes them.
__device__ void wait_for_the_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ void let_the_next_kernel_begin() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ uint4 read_once(const uint4* at) {
    uint4 words;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(at));
    return words;
}

__device__ void read_rows(unsigned (&rows)[4], unsigned at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(rows[0]), "=r"(rows[1]), "=r"(rows[2]), "=r"(rows[3])
                 : "r"(at));
}

__device__ void multiply_add(float (&sums)[4], const unsigned (&values)[4], unsigned low, unsigned high) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3]), "r"(low), "r"(high));
}

// The same of float16.
__device__ void multiply_add_half(float (&sums)[4], const unsigned (&values)[4], unsigned low, unsigned high) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3]), "r"(low), "r"(high));
}

// Two e4m3 in half `which` of a word, exactly.
template <int WHICH> __device__ unsigned halves_of(unsigned word) {
    unsigned halves;
    if constexpr (WHICH)
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}" : "=r"(halves) : "r"(word));
    else
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}" : "=r"(halves) : "r"(word));
    return halves;
}

__device__ unsigned half_pair(float low, float high) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ int cluster_size() {
    int size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

// What a block of the cluster keeps at an address of its shared memory.
__device__ float4 sums_of(unsigned at, int rank) {
    float4 sums;
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
                 : "=f"(sums.x), "=f"(sums.y), "=f"(sums.z), "=f"(sums.w)
                 : "r"(at), "r"(rank)
                 : "memory");
    return sums;
}

__device__ void meet_the_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Without the fence for what was written before, which takes long: the others have begun, or have read.
__device__ void leave_the_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

__device__ void meet_the_warp() { __syncwarp(); }

// The first so many threads.
template <int COUNT> __device__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(COUNT) : "memory"); }

// A warpgroup has so many registers a thread from here on; 0: those it has.
template <int COUNT> __device__ void take_registers() {
    if constexpr (COUNT) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT> __device__ void give_registers() {
    if constexpr (COUNT) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

__device__ void begin_barrier(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Barriers that begin are seen by copies.
__device__ void show_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

// Without a branch, between whose ends ptxas would let no wgmma be under way.
__device__ void arrive_if(unsigned barrier, bool does) {
    asm volatile("{\n.reg .pred does;\nsetp.ne.b32 does, %1, 0;\n"
                 "@does mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];\n}" ::"r"(barrier),
                 "r"((int)does)
                 : "memory");
}

// Arrives, and has the barrier wait for so many bytes of copies.
__device__ void expect_bytes(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ bool has_phase_ended(unsigned barrier, unsigned parity) {
    int has_ended;
    asm volatile("{\n.reg .pred ended;\nmbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
                 "selp.b32 %0, 1, 0, ended;\n}"
                 : "=r"(has_ended)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return has_ended;
}

__device__ void wait_for_phase(unsigned barrier, unsigned parity) {
    while (!has_phase_ended(barrier, parity)) {
    }
}

// A multiple of 16 bytes.
__device__ void copy_bytes(unsigned to, const void* from, int bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Rows in global memory (a tensor map).
struct alignas(64) RowMap {
    unsigned long long words[16];
};

// Some inputs of some rows, with zeros for those that there are not.
__device__ void copy_box(unsigned to, const RowMap& map, int input, int row, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
                 "[%2];" ::"r"(to),
                 "l"(&map), "r"(barrier), "r"(input), "r"(row)
                 : "memory");
}

__device__ void prepare(const RowMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// A number that is the same in all lanes, which the compiler need not know.
__device__ unsigned same_in_warp(unsigned number) { return __shfl_sync(0xFFFFFFFF, number, 0); }

__device__ unsigned from_lane_xor(unsigned word, int other) { return __shfl_xor_sync(0xFFFFFFFF, word, other); }

// Of 8 x 8 16-bit numbers, of which each lane has two: row lane / 4, columns lane % 4 * 2 and the next.
__device__ unsigned transposed(unsigned pair) {
    unsigned flipped;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(flipped) : "r"(pair));
    return flipped;
}

// What this thread wrote is seen by other blocks, once they see a flag that is set later.
__device__ void show_to_all() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ void set_flag(int* flag) { asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory"); }

// Waits for a flag, and takes it down.
__device__ void take_flag(int* flag) {
    int is_set;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(is_set) : "l"(flag) : "memory");
    } while (!is_set);
    *flag = 0;
}

__device__ float4 read_shown(const float4* at) {
    float4 sums;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(sums.x), "=f"(sums.y), "=f"(sums.z), "=f"(sums.w)
                 : "l"(at)
                 : "memory");
    return sums;
}

// What other instructions wrote to shared memory is seen by wgmma.
__device__ void show_copies_to_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ void begin_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ void close_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LATER> __device__ void wait_for_wgmma() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER) : "memory");
}

#ifdef ROWS
#define D_ "%0, %1, %2, %3"
#define D0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define D1 D0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define D2 D1 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define D3 D2 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
              ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define D4 D3 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
              ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
              ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
              ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define F4(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define F8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
                 "+f"(d[i + 6]), "+f"(d[i + 7])
#define F16(d, i) F8(d, i), F8(d, i + 8)
#define F32(d, i) F16(d, i), F16(d, i + 16)
#define F64(d, i) F32(d, i), F32(d, i + 32)
#define MULTIPLY_ADD(N, SUMS, OPERANDS, MORE, ...) \
    asm volatile("{\n.reg .pred more;\nsetp.ne.b32 more, " MORE ", 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 {" SUMS "}, " OPERANDS ", more, 1, 1, 0;\n}" \
                 : __VA_ARGS__ \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"((int)is_more))

// sums += values * rows, or sums = values * rows, later: a thread has 4 sums of each 8 rows.
__device__ void multiply_add(float (&sums)[ROWS / 2], const unsigned (&a)[4], unsigned long long rows,
                             bool is_more) {
#if ROWS == 8
    MULTIPLY_ADD("8", D_, "{%4, %5, %6, %7}, %8", "%9", F4(sums));
#elif ROWS == 16
    MULTIPLY_ADD("16", D0, "{%8, %9, %10, %11}, %12", "%13", F8(sums, 0));
#elif ROWS == 32
    MULTIPLY_ADD("32", D1, "{%16, %17, %18, %19}, %20", "%21", F16(sums, 0));
#elif ROWS == 64
    MULTIPLY_ADD("64", D2, "{%32, %33, %34, %35}, %36", "%37", F32(sums, 0));
#elif ROWS == 128
    MULTIPLY_ADD("128", D3, "{%64, %65, %66, %67}, %68", "%69", F64(sums, 0));
#else
    static_assert(ROWS == 256, "rows are 8, 16, 32, 64, 128 or 256");
    MULTIPLY_ADD("256", D4, "{%128, %129, %130, %131}, %132", "%133", F64(sums, 0), F64(sums, 64));
#endif
}

#define MULTIPLY_ADD_E4M3(N, SUMS, OPERANDS, MORE, ...) \
    asm volatile("{\n.reg .pred more;\nsetp.ne.b32 more, " MORE ", 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n" N "k32.f32.e4m3.e4m3 {" SUMS "}, " OPERANDS ", more, 1, 1;\n}" \
                 : __VA_ARGS__ \
                 : "l"(weights), "l"(rows), "r"((int)is_more))

// The same of e4m3, both from shared memory. The tensor cores keep fewer bits than float32 of such sums.
__device__ void multiply_add(float (&sums)[ROWS / 2], unsigned long long weights, unsigned long long rows,
                             bool is_more) {
#if ROWS == 8
    MULTIPLY_ADD_E4M3("8", D_, "%4, %5", "%6", F4(sums));
#elif ROWS == 16
    MULTIPLY_ADD_E4M3("16", D0, "%8, %9", "%10", F8(sums, 0));
#elif ROWS == 32
    MULTIPLY_ADD_E4M3("32", D1, "%16, %17", "%18", F16(sums, 0));
#elif ROWS == 64
    MULTIPLY_ADD_E4M3("64", D2, "%32, %33", "%34", F32(sums, 0));
#elif ROWS == 128
    MULTIPLY_ADD_E4M3("128", D3, "%64, %65", "%66", F64(sums, 0));
#else
    MULTIPLY_ADD_E4M3("256", D4, "%128, %129", "%130", F64(sums, 0), F64(sums, 64));
#endif
}
#endif
