// The fast engine of the virtual GPU: takes the turns of warps and executes the common instructions. Everything else is
// an escape: core_run returns to Python, which runs the reference's step for that one instruction and calls again.
//
// The structures are those of state.py, the rules of scheduling those of device.py, and every result has the bits of the
// reference. An instruction that would be a fault changes nothing here and escapes, so that the reference reports it.
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;

enum { MAX_SPLITS = 33, MAX_WAITS = 16, MAX_CLUSTER = 16 };
enum { BLOCKED = -2, EXIT = -1 };
enum { SHARED_OFFSET_BITS = 24, RESERVED_SHARED_BYTES = 1024, OUT_OF_TURN = 20 };
#define ALL_LANES 0xFFFFFFFFu
#define SHARED_WINDOW (1ull << 56)
static const u64 TURNS[] = {20, 200, 2000};
static const u32 CANONICAL_NAN = 0x7FFFFFFF;

typedef struct {
    u64 address, mask, seen;
} wait_word;

typedef struct {
    u32 pc, mask, num_waits, unused;
    wait_word waits[MAX_WAITS];
} split;

typedef struct {
    u64 start, end;
    u8 *defined;  // a byte for each: whether it was written; NULL: not tracked
} allocation;

typedef struct {
    const allocation *allocations;  // in the order of their addresses
    u64 count, last;
} memory;

typedef struct cta {
    u8 *shared;
    u64 shared_end;
    u32 rank, cluster_size;
    struct cta *peers[MAX_CLUSTER];
} cta;

typedef struct {
    u16 op;
    u8 guard;  // 0: none, 1: lanes whose predicate is set, 2: the others
    u8 size;   // bytes of an element, a register or a predicate, as the op needs
    u32 guard_at;
    u32 d, a, b, c;  // offsets in the register file of the warp
    u32 flags, count;
    u64 value;
} instruction;

typedef struct {
    const instruction *code;
    u64 *counts;
    const u32 *lists;  // offsets of registers in braces
    memory *memory;
} grid;

typedef struct {
    u8 *registers;
    cta *cta;
    grid *grid;
    u64 progress, async_steps, blocked;
    u32 alive, index, num_splits, gives_way, has_effect, unused;
    split splits[MAX_SPLITS];
} warp;

typedef struct {
    u64 rng, time_ns, executed, version, max_steps;
    u32 async_percent, num_operations, num_warps, stage;
    warp **warps;
    u32 *order;
    u32 position, deaths;
    u64 ran, turn, turn_executed;
    u32 chosen, operation, pc, mask, escaped;
    s32 outcome;
    u32 num_waits, unused;
    wait_word waits[MAX_WAITS];
} machine;

enum { NOTHING, ROUND_ENDED, ESCAPED, ADVANCE, DIED };        // what core_run returns
enum { BETWEEN_ROUNDS, IN_TURN, AFTER_ADVANCE };              // machine.stage
static const u32 NONE = 0xFFFFFFFF;                           // machine.chosen

// ------------------------------------------------------------------------------------------------- splits and waiting

static u32 below(machine *m, u32 count)
{
    m->rng = m->rng * 6364136223846793005ull + 1442695040888963407ull;
    return (u32)((m->rng >> 32) * count >> 32);
}

static int is_parked(const split *s)
{
    for (u32 i = 0; i < s->num_waits; i++)
        if ((*(volatile const u64 *)s->waits[i].address & s->waits[i].mask) != s->waits[i].seen)
            return 0;
    return s->num_waits != 0;
}

static u32 first_runnable(const warp *w)
{
    for (u32 i = 0; i < w->num_splits; i++)
        if (!is_parked(w->splits + i))
            return i;
    return NONE;
}

static void remove_split(warp *w, u32 position)
{
    w->num_splits--;
    memmove(w->splits + position, w->splits + position + 1, (w->num_splits - position) * sizeof(split));
}

static void place(warp *w, u32 pc, u32 mask, u32 num_waits, const wait_word *waits)
{
    u32 position = 0;
    while (position < w->num_splits && w->splits[position].pc < pc)
        position++;
    split *s = w->splits + position;
    if (position < w->num_splits && s->pc == pc) {
        s->mask |= mask;
        s->num_waits = 0;
        return;
    }
    memmove(s + 1, s, (w->num_splits - position) * sizeof(split));
    w->num_splits++;
    s->pc = pc, s->mask = mask, s->num_waits = num_waits;
    memcpy(s->waits, waits, num_waits * sizeof *waits);
}

static int is_taken(const warp *w, u32 pc)
{
    for (u32 i = 0; i < w->num_splits; i++)
        if (w->splits[i].pc == pc)
            return 1;
    return 0;
}

// The next place of another split: code that runs on without a branch meets it there.
static u32 next_other(const warp *w, u32 pc)
{
    for (u32 i = 0; i < w->num_splits; i++)
        if (w->splits[i].pc > pc)
            return w->splits[i].pc;
    return NONE;
}

// ------------------------------------------------------------------------------------------------------------- memory

static u8 *global_at(memory *all, u64 address, u64 size, int writes)
{
    const allocation *a = all->allocations + all->last;
    if (address & (size - 1))
        return NULL;
    if (all->count == 0)
        return NULL;
    if (address < a->start || address + size > a->end) {
        u64 low = 0, high = all->count;  // the last that starts at or before the address
        while (high - low > 1) {
            u64 middle = (low + high) / 2;
            if (all->allocations[middle].start <= address)
                low = middle;
            else
                high = middle;
        }
        a = all->allocations + low;
        if (address < a->start || address + size > a->end)
            return NULL;
        all->last = low;
    }
    if (a->defined && !writes)
        for (u64 i = 0; i < size; i++)
            if (!a->defined[address - a->start + i])
                return NULL;
    return (u8 *)address;
}

static void set_defined(memory *all, const u8 *at, u64 size)
{
    const allocation *a = all->allocations + all->last;
    u64 address = (u64)at;
    if (address < a->start || address >= a->end) {
        if (!global_at(all, address, 1, 1))
            return;
        a = all->allocations + all->last;
    }
    if (a->defined)
        memset(a->defined + (address - a->start), 1, size);
}

static u8 *shared_at(const cta *own, u64 address, u64 size)
{
    u64 plain = address & (SHARED_WINDOW - 1), rank = plain >> SHARED_OFFSET_BITS;
    u64 offset = plain & ((1u << SHARED_OFFSET_BITS) - 1);
    const cta *of = own;
    if (rank != own->rank) {
        if (rank >= own->cluster_size)
            return NULL;
        of = own->peers[rank];
    }
    if (offset < RESERVED_SHARED_BYTES || offset + size > of->shared_end || offset & (size - 1))
        return NULL;
    return of->shared + offset;
}

enum { GLOBAL, SHARED, GENERIC };

// Pointers to what each active lane accesses; 0 if any access would be a fault. ``space`` becomes global or shared.
static int resolve(const warp *w, const u64 *addresses, u32 active, u32 size, int *space, int writes, u8 **at)
{
    if (*space == GENERIC) {
        u32 inside = 0;
        for (u32 i = 0; i < 32; i++)
            inside |= (u32)(addresses[i] >= SHARED_WINDOW) << i;
        inside &= active;
        if (inside && inside != active)
            return 0;
        *space = inside ? SHARED : GLOBAL;
    }
    for (u32 rest = active; rest; rest &= rest - 1) {
        u32 i = (u32)__builtin_ctz(rest);
        at[i] = *space == GLOBAL ? global_at(w->grid->memory, addresses[i], size, writes)
                                 : shared_at(w->cta, addresses[i], size);
        if (!at[i])
            return 0;
    }
    return 1;
}

// [base + value]; a base of 4 bytes wraps.
static void addresses_of(const u8 *registers, const instruction *in, u32 base, u64 *addresses)
{
    if (in->flags & 1) {
        const u64 *wide = (const u64 *)(registers + base);
        for (u32 i = 0; i < 32; i++)
            addresses[i] = wide[i] + in->value;
    } else {
        const u32 *narrow = (const u32 *)(registers + base);
        for (u32 i = 0; i < 32; i++)
            addresses[i] = (u32)(narrow[i] + (u32)in->value);
    }
}

static u64 load_bits(const u8 *at, u32 size)
{
    u64 bits = 0;
    memcpy(&bits, at, size);
    return bits;
}

static u64 sign_extended(u64 bits, u32 size)
{
    u32 shift = 64 - 8 * size;
    return (u64)((s64)(bits << shift) >> shift);
}

// ------------------------------------------------------------------------------------------------------------- values

static u32 bits_of(f32 x)
{
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static f32 of_bits(u32 bits)
{
    f32 x;
    memcpy(&x, &bits, 4);
    return x;
}

static f32 flushed(f32 x)
{
    u32 bits = bits_of(x);
    return of_bits(bits & 0x7F800000 ? bits : bits & 0x80000000);
}

static f32 canonical(f32 x) { return x != x ? of_bits(CANONICAL_NAN) : x; }
static f32 smaller(f32 a, f32 b) { return a < b || (a == b && bits_of(a) >> 31) || b != b ? a : b; }
static f32 larger(f32 a, f32 b) { return a > b || (a == b && !(bits_of(a) >> 31)) || b != b ? a : b; }
static f32 smaller_or_nan(f32 a, f32 b) { return a != a ? a : b != b ? b : smaller(a, b); }
static f32 larger_or_nan(f32 a, f32 b) { return a != a ? a : b != b ? b : larger(a, b); }

static u16 to_bf16(f32 x)
{
    u32 bits = bits_of(x);
    return x != x ? 0x7FFF : (u16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static u16 to_f16(f32 x)
{
    u32 bits = bits_of(x), sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF;
    if (size > 0x7F800000)
        return 0x7FFF;
    if (size >= 0x477FF000)  // from 65520 on, the nearest is infinity
        return (u16)(sign | 0x7C00);
    if (size < 0x38800000) {  // subnormal: a multiple of 2^-24; the sum rounds to such
        f32 sum = of_bits(size) + 0.5f;
        return (u16)(sign | (bits_of(sum) - bits_of(0.5f)));
    }
    return (u16)(sign | ((size + 0xFFF + (size >> 13 & 1) - 0x38000000) >> 13));
}

static f32 of_f16(u16 half)
{
    u32 sign = (u32)(half & 0x8000) << 16, size = half & 0x7FFF;
    if (size >= 0x7C00)
        return of_bits(size > 0x7C00 ? CANONICAL_NAN : sign | 0x7F800000);
    if (size < 0x400)
        return of_bits(sign | bits_of((f32)size * 0x1p-24f));
    return of_bits(sign | ((size << 13) + 0x38000000));
}

// 2^x as float_arithmetic.py computes it, operation by operation.
static f32 power_of_two(f32 x)
{
    static const double c[] = {
        0x1.0000000000000p+0,  0x1.62e42fefa39efp-1,  0x1.ebfbdff82c58fp-3,  0x1.c6b08d704a0c0p-5,
        0x1.3b2ab6fba4e77p-7,  0x1.5d87fe78a6731p-10, 0x1.430912f86c787p-13, 0x1.ffcbfc588b0c7p-17,
        0x1.62c0223a5c824p-20, 0x1.b5253d395e7c4p-24, 0x1.e4cf5158b8ecap-28, 0x1.e8cac7351bb25p-32,
        0x1.c3bd650fc2986p-36, 0x1.816193166d0f9p-40};
    if (x != x)
        return of_bits(CANONICAL_NAN);
    double limited = x < -1000 ? -1000 : x > 1000 ? 1000 : x, whole = rint(limited), rest = limited - whole;
    double sum = c[13];
    for (int i = 12; i >= 0; i--)
        sum = sum * rest + c[i];
    u64 scale = (u64)((s64)whole + 1023) << 52;
    double factor;
    memcpy(&factor, &scale, 8);
    return (f32)(sum * factor);
}

static u32 predicate_bits(const u8 *predicate)
{
    u32 bits = 0;
    for (u32 i = 0; i < 4; i++) {
        u64 eight;
        memcpy(&eight, predicate + 8 * i, 8);
        bits |= (u32)(eight * 0x0102040810204080ull >> 56) << (8 * i);
    }
    return bits;
}

static u64 rounded_to_integer(double x, u32 how, u32 size, int is_signed)
{
    if (x != x)
        x = 0;
    x = how == 0 ? rint(x) : how == 1 ? trunc(x) : how == 2 ? floor(x) : ceil(x);
    if (is_signed) {
        s64 high = (s64)((1ull << (8 * size - 1)) - 1), low = -high - 1;
        return (u64)(x >= (double)high ? high : x <= (double)low ? low : (s64)x);
    }
    u64 high = size == 8 ? ~0ull : (1ull << 8 * size) - 1;
    return x >= (double)high ? high : x <= 0 ? 0 : (u64)x;
}

// ----------------------------------------------------------------------------------------------------------- mbarriers

enum { BARRIER_COUNT_BITS = 20, BARRIER_TX_SHIFT = 41 };
static const s64 MAX_COUNT = (1 << 20) - 1;

// 0 if the update would be a fault.
static int update_barrier(u8 *at, s64 arrivals, s64 num_bytes)
{
    u64 word;
    memcpy(&word, at, 8);
    u64 phase = word & 1, expected = word >> 21 & (u64)MAX_COUNT;
    s64 pending = (s64)(word >> 1 & (u64)MAX_COUNT) - arrivals;
    s64 missing = ((s64)word >> BARRIER_TX_SHIFT) + num_bytes;
    if (pending < 0 || missing > MAX_COUNT || missing < -MAX_COUNT)
        return 0;
    if (pending == 0 && missing == 0)
        phase ^= 1, pending = (s64)expected;
    word = phase | (u64)pending << 1 | expected << 21 | (u64)missing << BARRIER_TX_SHIFT;
    memcpy(at, &word, 8);
    return 1;
}

// ------------------------------------------------------------------------------------------------------- instructions

#define INTEGERS(X) X(u16) X(u32) X(u64)
#define COMPARED(X) X(u16) X(s16) X(u32) X(s32) X(u64) X(s64) X(f32)

// Every op by name; fast.py finds its number by this list.
#define BINARY_OPS(X, T)                                                                                               \
    X(add_##T) X(sub_##T) X(mul_##T) X(and_##T) X(or_##T) X(xor_##T) X(shl_##T) X(shr_##T)
#define SIGNED_OPS(X, T, S) X(shr_##S) X(min_##S) X(max_##S) X(min_##T) X(max_##T) X(div_##T) X(div_##S) X(rem_##T) X(rem_##S)
#define FLOAT_OPS(X, F)                                                                                                \
    X(add_##F) X(sub_##F) X(mul_##F) X(div_##F) X(fma_##F) X(min_##F) X(max_##F) X(min_nan_##F) X(max_nan_##F)        \
    X(neg_##F) X(abs_##F) X(ex2_##F) X(rcp_##F) X(sqrt_##F) X(rsqrt_##F)
#define SETP_OPS(X, T) X(eq_##T) X(ne_##T) X(lt_##T) X(le_##T) X(gt_##T) X(ge_##T)
#define OPS(X)                                                                                                         \
    X(escape) X(bra) X(ret) X(nop) X(nanosleep) X(timer)                                                               \
    BINARY_OPS(X, u16) BINARY_OPS(X, u32) BINARY_OPS(X, u64)                                                           \
    SIGNED_OPS(X, u32, s32) SIGNED_OPS(X, u64, s64) SIGNED_OPS(X, u16, s16)                                            \
    X(and_u8) X(or_u8) X(xor_u8) X(not_u8) X(not_u16) X(not_u32) X(not_u64)                                            \
    X(neg_u16) X(neg_u32) X(neg_u64) X(abs_s16) X(abs_s32) X(abs_s64)                                                  \
    X(mad_u16) X(mad_u32) X(mad_u64) X(mul_wide_u16) X(mul_wide_s16) X(mul_wide_u32) X(mul_wide_s32)                   \
    X(mad_wide_u16) X(mad_wide_s16) X(mad_wide_u32) X(mad_wide_s32) X(mul_hi_u32) X(mul_hi_s32)                        \
    X(lop3) X(shf_l_wrap) X(shf_l_clamp) X(shf_r_wrap) X(shf_r_clamp) X(prmt) X(bfe_u32)                               \
    X(popc_u32) X(popc_u64) X(clz_u32) X(clz_u64) X(brev_u32)                                                          \
    FLOAT_OPS(X, f32) FLOAT_OPS(X, f32_ftz) X(add_f32x2) X(sub_f32x2) X(mul_f32x2) X(fma_f32x2)                        \
    X(add_f32x2_ftz) X(sub_f32x2_ftz) X(mul_f32x2_ftz) X(fma_f32x2_ftz)                                                \
    SETP_OPS(X, u16) SETP_OPS(X, s16) SETP_OPS(X, u32) SETP_OPS(X, s32) SETP_OPS(X, u64) SETP_OPS(X, s64)              \
    SETP_OPS(X, f32) X(equ_f32) X(neu_f32) X(ltu_f32) X(leu_f32) X(gtu_f32) X(geu_f32) X(num_f32) X(nan_f32)           \
    X(selp_u16) X(selp_u32) X(selp_u64) X(mov_u8) X(mov_u16) X(mov_u32) X(mov_u64) X(mov_u128) X(pack) X(unpack)       \
    X(to_shared) X(from_shared)                                                                                        \
    X(cvt_int) X(cvt_bf16_f32) X(cvt_f16_f32) X(cvt_bf16x2_f32) X(cvt_f16x2_f32) X(cvt_f32_bf16) X(cvt_f32_f16)       \
    X(cvt_f32_s32) X(cvt_f32_u32) X(cvt_f32_s64) X(cvt_f32_u64) X(cvt_int_f32)                                         \
    X(ld) X(st) X(atom) X(shfl) X(vote) X(elect) X(warp_sync)                                                          \
    X(try_wait) X(arrive) X(stmatrix) X(ldmatrix)

#define AS_NUMBER(name) OP_##name,
enum { OPS(AS_NUMBER) NUM_OPS };
#define AS_TEXT(name) #name,
const char *const core_op_names[] = {OPS(AS_TEXT) NULL};

// Flags of the ops that have several.
enum { WIDE_ADDRESS = 1, SPACE_SHIFT = 1, SIGNED = 8, REGISTER_SHIFT = 8, OPERATION_SHIFT = 16 };
enum { COMBINE_AND = 1, COMBINE_OR, COMBINE_XOR, INVERTED = 4, HAS_OTHER = 8 };
enum { ATOM_ADD, ATOM_EXCH, ATOM_MIN, ATOM_MAX, ATOM_AND, ATOM_OR, ATOM_XOR, ATOM_INC, ATOM_DEC, ATOM_CAS };
enum { SHFL_IDX, SHFL_UP, SHFL_DOWN, SHFL_BFLY };
enum { VOTE_BALLOT, VOTE_ALL, VOTE_ANY, VOTE_UNI };
enum { ARRIVES = 1 << 16, ANNOUNCES = 1 << 17 };

// Statements for each active lane i. Lanes never look at each other's registers.
#define LANES(statement)                                                                                               \
    do {                                                                                                               \
        if (active == ALL_LANES) {                                                                                     \
            _Pragma("GCC ivdep") for (u32 i = 0; i < 32; i++) { statement; }                                           \
        } else {                                                                                                       \
            for (u32 rest = active; rest; rest &= rest - 1) {                                                          \
                u32 i = (u32)__builtin_ctz(rest);                                                                      \
                statement;                                                                                             \
            }                                                                                                          \
        }                                                                                                              \
    } while (0)
#define REGISTER(T, name) T *name = (T *)(registers + in->name)
#define UNARY(op, D, T, expression)                                                                                    \
    case OP_##op: {                                                                                                    \
        REGISTER(D, d);                                                                                                \
        REGISTER(const T, a);                                                                                          \
        LANES(T x = a[i]; d[i] = (D)(expression));                                                                     \
        break;                                                                                                         \
    }
#define BINARY(op, D, T, expression)                                                                                   \
    case OP_##op: {                                                                                                    \
        REGISTER(D, d);                                                                                                \
        REGISTER(const T, a);                                                                                          \
        REGISTER(const T, b);                                                                                          \
        LANES(T x = a[i]; T y = b[i]; d[i] = (D)(expression));                                                         \
        break;                                                                                                         \
    }
#define TERNARY(op, D, T, C, expression)                                                                               \
    case OP_##op: {                                                                                                    \
        REGISTER(D, d);                                                                                                \
        REGISTER(const T, a);                                                                                          \
        REGISTER(const T, b);                                                                                          \
        REGISTER(const C, c);                                                                                          \
        LANES(T x = a[i]; T y = b[i]; C z = c[i]; d[i] = (D)(expression));                                             \
        break;                                                                                                         \
    }
#define SHIFT(op, T, expression)                                                                                       \
    case OP_##op: {                                                                                                    \
        REGISTER(T, d);                                                                                                \
        REGISTER(const T, a);                                                                                          \
        REGISTER(const u32, b);                                                                                        \
        const u32 width = 8 * sizeof(T);                                                                               \
        (void)width;                                                                                                   \
        LANES(T x = a[i]; u32 n = b[i]; d[i] = (T)(expression));                                                       \
        break;                                                                                                         \
    }
// Both floats of 64 bits are a lane here: the mask is widened.
#define PACKED(op, expression)                                                                                         \
    case OP_##op: {                                                                                                    \
        REGISTER(f32, d);                                                                                              \
        REGISTER(const f32, a);                                                                                        \
        REGISTER(const f32, b);                                                                                        \
        REGISTER(const f32, c);                                                                                        \
        for (u32 i = 0; i < 64; i++)                                                                                   \
            if (active >> i / 2 & 1) {                                                                                 \
                f32 x = a[i], y = b[i], z = c[i];                                                                      \
                (void)z;                                                                                               \
                d[i] = (expression);                                                                                   \
            }                                                                                                          \
        break;                                                                                                         \
    }
#define SETP(op, T, expression)                                                                                        \
    case OP_##op: {                                                                                                    \
        REGISTER(const T, a);                                                                                          \
        REGISTER(const T, b);                                                                                          \
        _Pragma("GCC ivdep") for (u32 i = 0; i < 32; i++)                                                              \
        {                                                                                                              \
            T x = a[i], y = b[i];                                                                                      \
            result[i] = (u8)(expression);                                                                              \
        }                                                                                                              \
        goto compared;                                                                                                 \
    }
#define SETPS(T)                                                                                                       \
    SETP(eq_##T, T, x == y)                                                                                            \
    SETP(lt_##T, T, x < y)                                                                                             \
    SETP(le_##T, T, x <= y)                                                                                            \
    SETP(gt_##T, T, x > y)                                                                                             \
    SETP(ge_##T, T, x >= y)
#define UNORDERED (x != x || y != y)

#define INTEGER(T)                                                                                                     \
    BINARY(add_##T, T, T, x + y)                                                                                       \
    BINARY(sub_##T, T, T, x - y)                                                                                       \
    BINARY(mul_##T, T, T, (u64)x * y)                                                                                  \
    BINARY(and_##T, T, T, x & y)                                                                                       \
    BINARY(or_##T, T, T, x | y)                                                                                        \
    BINARY(xor_##T, T, T, x ^ y)                                                                                       \
    UNARY(not_##T, T, T, ~x)                                                                                           \
    UNARY(neg_##T, T, T, -x)                                                                                           \
    TERNARY(mad_##T, T, T, T, (u64)x * y + z)                                                                          \
    SHIFT(shl_##T, T, n < width ? x << n : 0)                                                                          \
    SHIFT(shr_##T, T, n < width ? x >> n : 0)
#define SIGNED_INTEGER(T, S)                                                                                           \
    SHIFT(shr_##S, S, x >> (n < width ? n : width - 1))                                                                \
    BINARY(min_##S, S, S, x < y ? x : y)                                                                               \
    BINARY(max_##S, S, S, x > y ? x : y)                                                                               \
    BINARY(min_##T, T, T, x < y ? x : y)                                                                               \
    BINARY(max_##T, T, T, x > y ? x : y)                                                                               \
    UNARY(abs_##S, T, S, x < 0 ? -(T)x : (T)x)                                                                         \
    BINARY(div_##T, T, T, y ? x / y : ~(T)0)                                                                           \
    BINARY(div_##S, S, S, y == 0 ? ~(S)0 : y == -1 ? (S)(-(T)x) : x / y)                                               \
    BINARY(rem_##T, T, T, y ? x % y : x)                                                                               \
    BINARY(rem_##S, S, S, y == 0 ? x : y == -1 ? 0 : x % y)
#define WIDE(T, W)                                                                                                     \
    BINARY(mul_wide_##T, W, T, (W)x *(W)y)                                                                             \
    TERNARY(mad_wide_##T, W, T, W, (W)((W)x * (W)y) + z)

#define SAME(x) (x)
#define FLOATS(F, IN, OUT)                                                                                             \
    BINARY(add_##F, f32, f32, OUT(IN(x) + IN(y)))                                                                      \
    BINARY(sub_##F, f32, f32, OUT(IN(x) - IN(y)))                                                                      \
    BINARY(mul_##F, f32, f32, OUT(IN(x) * IN(y)))                                                                      \
    BINARY(div_##F, f32, f32, OUT(IN(x) / IN(y)))                                                                      \
    TERNARY(fma_##F, f32, f32, f32, OUT(fmaf(IN(x), IN(y), IN(z))))                                                    \
    BINARY(min_##F, f32, f32, OUT(smaller(IN(x), IN(y))))                                                              \
    BINARY(max_##F, f32, f32, OUT(larger(IN(x), IN(y))))                                                               \
    BINARY(min_nan_##F, f32, f32, OUT(smaller_or_nan(IN(x), IN(y))))                                                   \
    BINARY(max_nan_##F, f32, f32, OUT(larger_or_nan(IN(x), IN(y))))                                                    \
    UNARY(neg_##F, f32, f32, of_bits(bits_of(IN(x)) ^ 0x80000000))                                                     \
    UNARY(abs_##F, f32, f32, of_bits(bits_of(IN(x)) & 0x7FFFFFFF))                                                     \
    UNARY(ex2_##F, f32, f32, OUT(power_of_two(IN(x))))                                                                 \
    UNARY(rcp_##F, f32, f32, OUT(1.0f / IN(x)))                                                                        \
    UNARY(sqrt_##F, f32, f32, OUT(sqrtf(IN(x))))                                                                       \
    UNARY(rsqrt_##F, f32, f32, OUT((f32)(1.0 / sqrt((double)IN(x)))))
#define FLUSHED_RESULT(x) flushed(canonical(x))
#define PACKED_FLOATS(F, IN, OUT)                                                                                      \
    PACKED(add_##F, OUT(IN(x) + IN(y)))                                                                                \
    PACKED(sub_##F, OUT(IN(x) - IN(y)))                                                                                \
    PACKED(mul_##F, OUT(IN(x) * IN(y)))                                                                                \
    PACKED(fma_##F, OUT(fmaf(IN(x), IN(y), IN(z))))

static u32 permuted(u32 low, u32 high, u32 selector)
{
    u64 joined = (u64)high << 32 | low;
    u32 result = 0;
    for (u32 i = 0; i < 4; i++) {
        u32 nibble = selector >> (4 * i) & 15, byte = (u32)(joined >> 8 * (nibble & 7)) & 0xFF;
        result |= (nibble & 8 ? (byte & 0x80 ? 0xFFu : 0) : byte) << 8 * i;
    }
    return result;
}

static u32 chosen_bits(u32 a, u32 b, u32 c, u32 table)
{
    u32 result = 0;
    for (u32 row = 0; row < 8; row++)
        if (table >> row & 1)
            result |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
    return result;
}

static u32 reversed(u32 x)
{
    x = (x & 0x55555555) << 1 | (x >> 1 & 0x55555555);
    x = (x & 0x33333333) << 2 | (x >> 2 & 0x33333333);
    x = (x & 0x0F0F0F0F) << 4 | (x >> 4 & 0x0F0F0F0F);
    return __builtin_bswap32(x);
}

static u32 extracted(u32 x, u32 position, u32 length)
{
    position &= 255, length &= 255;
    u64 kept = (1ull << (length < 32 ? length : 32)) - 1;
    return (u32)((u64)x >> (position < 63 ? position : 63) & kept);
}

// The lanes that ``members`` names, that live, and that are not here.
static u32 lanes_missing(const warp *w, u32 active, u32 members)
{
    return active == ALL_LANES ? 0 : members & w->alive & ~active;
}

static void put_predicate(u8 *predicate, u32 active, u32 bits)
{
    for (u32 i = 0; i < 32; i++)
        if (active >> i & 1)
            predicate[i] = bits >> i & 1;
}

// -------------------------------------------------------------------------------------- instructions that touch memory

static int do_load(const warp *w, const instruction *in, u32 active)
{
    u8 *registers = w->registers, *at[32];
    u64 addresses[32];
    u32 size = in->size, held = in->flags >> REGISTER_SHIFT & 0xFF, count = in->count;
    int space = in->flags >> SPACE_SHIFT & 3;
    addresses_of(registers, in, in->a, addresses);
    if (!resolve(w, addresses, active, size * count, &space, 0, at))
        return 0;
    const u32 *list = w->grid->lists + in->d;
    for (u32 k = 0; k < count; k++) {
        u8 *d = registers + list[k];
        if (size == 4 && held == 4)
            LANES(memcpy(d + 4 * i, at[i] + 4 * k, 4));
        else if (size == 8 && held == 8)
            LANES(memcpy(d + 8 * i, at[i] + 8 * k, 8));
        else
            LANES(u64 bits = load_bits(at[i] + size * k, size);
                  if (in->flags & SIGNED) bits = sign_extended(bits, size);
                  memcpy(d + held * i, &bits, held));
    }
    return 1;
}

static int do_store(machine *m, warp *w, const instruction *in, u32 active)
{
    u8 *registers = w->registers, *at[32];
    u64 addresses[32];
    u32 size = in->size, count = in->count;
    int space = in->flags >> SPACE_SHIFT & 3;
    addresses_of(registers, in, in->a, addresses);
    if (!resolve(w, addresses, active, size * count, &space, 1, at))
        return 0;
    const u32 *list = w->grid->lists + in->d;  // pairs: offset, bytes of the register
    for (u32 rest = active; rest; rest &= rest - 1) {
        u32 i = (u32)__builtin_ctz(rest);
        for (u32 k = 0; k < count; k++)
            memcpy(at[i] + size * k, registers + list[2 * k] + list[2 * k + 1] * i, size);
        if (space == GLOBAL)
            set_defined(w->grid->memory, at[i], size * count);
    }
    m->version++;
    w->has_effect = 1;
    return 1;
}

static u64 updated(u32 operation, int is_signed, u32 size, u64 old, u64 x, u64 other)
{
    int less = is_signed ? (s64)sign_extended(x, size) < (s64)sign_extended(old, size) : x < old;
    switch (operation) {
    case ATOM_ADD: return old + x;
    case ATOM_EXCH: return x;
    case ATOM_MIN: return less ? x : old;
    case ATOM_MAX: return less ? old : x;
    case ATOM_AND: return old & x;
    case ATOM_OR: return old | x;
    case ATOM_XOR: return old ^ x;
    case ATOM_INC: return old >= x ? 0 : old + 1;
    case ATOM_DEC: return old == 0 || old > x ? x : old - 1;
    default: return old == x ? other : old;
    }
}

static int do_atom(machine *m, warp *w, const instruction *in, u32 active)
{
    u8 *registers = w->registers, *at[32];
    u64 addresses[32], before[32];
    u32 size = in->size;
    int space = in->flags >> SPACE_SHIFT & 3;
    addresses_of(registers, in, in->a, addresses);
    if (!resolve(w, addresses, active, size, &space, 0, at))
        return 0;
    for (u32 rest = active; rest; rest &= rest - 1) {
        u32 i = (u32)__builtin_ctz(rest);
        u64 old = before[i] = load_bits(at[i], size);
        u64 x = load_bits(registers + in->b + size * i, size), other = load_bits(registers + in->c + size * i, size);
        u64 now = updated(in->flags >> OPERATION_SHIFT, (in->flags & SIGNED) != 0, size, old, x, other);
        if (size == 4)
            now &= 0xFFFFFFFF;
        if (now != old) {
            memcpy(at[i], &now, size);
            m->version++;
            w->has_effect = 1;
        }
    }
    if (in->count)
        for (u32 rest = active; rest; rest &= rest - 1) {
            u32 i = (u32)__builtin_ctz(rest);
            memcpy(registers + in->d + size * i, before + i, size);
        }
    return 1;
}

// 1: done, 0: fault, -1: a barrier has not ended its phase, with the wait in ``on``
static int do_try_wait(warp *w, const instruction *in, u32 active, wait_word *on)
{
    u8 *registers = w->registers;
    u64 addresses[32];
    addresses_of(registers, in, in->a, addresses);
    for (u32 rest = active; rest; rest &= rest - 1) {
        u32 i = (u32)__builtin_ctz(rest);
        u8 *at = shared_at(w->cta, addresses[i], 8);
        if (!at || at < w->cta->shared || at >= w->cta->shared + w->cta->shared_end)
            return 0;
        u64 parity = registers[in->b + in->size * i] & 1;
        if ((at[0] & 1) == parity) {
            *on = (wait_word){(u64)at, 1, parity};
            return -1;
        }
    }
    w->has_effect = 1;
    put_predicate(registers + in->d, active, ALL_LANES);
    return 1;
}

static int do_arrive(machine *m, warp *w, const instruction *in, u32 active)
{
    u8 *registers = w->registers, *at[32];
    u64 addresses[32], before[32];
    addresses_of(registers, in, in->a, addresses);
    const u32 *amounts = (const u32 *)(registers + in->b);
    u32 done = 0;
    for (u32 rest = active; rest; rest &= rest - 1) {
        u32 i = (u32)__builtin_ctz(rest);
        s64 amount = in->count ? amounts[i] : 1;
        at[i] = shared_at(w->cta, addresses[i], 8);
        int ok = at[i] != NULL;
        if (ok) {
            before[i] = load_bits(at[i], 8);
            ok = in->flags & ANNOUNCES ? update_barrier(at[i], in->flags & ARRIVES ? 1 : 0, amount)
                                       : update_barrier(at[i], amount, 0);
        }
        if (!ok) {  // as if nothing had happened: the reference does it again and reports
            while (done) {
                u32 last = 31 - (u32)__builtin_clz(done);
                memcpy(at[last], before + last, 8);
                done &= ~(1u << last);
            }
            return 0;
        }
        done |= 1u << i;
        m->version++;
    }
    w->has_effect = 1;
    u64 *d = (u64 *)(registers + in->d);
    LANES(d[i] = before[i]);
    return 1;
}

static int do_stmatrix(machine *m, warp *w, const instruction *in)
{
    u8 *registers = w->registers, *at[32];
    u64 addresses[32];
    u32 tiles = in->count, rows = tiles == 4 ? ALL_LANES : (1u << 8 * tiles) - 1;
    int space = SHARED;
    addresses_of(registers, in, in->a, addresses);
    if (!resolve(w, addresses, rows, 16, &space, 1, at))
        return 0;
    const u32 *list = w->grid->lists + in->d;
    for (u32 tile = 0; tile < tiles; tile++) {
        const u16 *from = (const u16 *)(registers + list[tile]);
        for (u32 row = 0; row < 8; row++) {
            u16 *to = (u16 *)at[8 * tile + row];
            for (u32 k = 0; k < 8; k++)
                to[k] = in->flags & SIGNED ? from[8 * k + row] : from[8 * row + k];
        }
    }
    m->version++;
    w->has_effect = 1;
    return 1;
}

static int do_ldmatrix(warp *w, const instruction *in)
{
    u8 *registers = w->registers, *at[32];
    u64 addresses[32];
    u32 tiles = in->count, rows = tiles == 4 ? ALL_LANES : (1u << 8 * tiles) - 1;
    int space = SHARED;
    addresses_of(registers, in, in->a, addresses);
    if (!resolve(w, addresses, rows, 16, &space, 0, at))
        return 0;
    const u32 *list = w->grid->lists + in->d;
    for (u32 tile = 0; tile < tiles; tile++) {
        u16 *to = (u16 *)(registers + list[tile]);
        for (u32 row = 0; row < 8; row++) {
            const u16 *from = (const u16 *)at[8 * tile + row];
            for (u32 k = 0; k < 8; k++)
                to[in->flags & SIGNED ? 8 * k + row : 8 * row + k] = from[k];
        }
    }
    return 1;
}

static void do_shfl(const warp *w, const instruction *in, u32 active)
{
    u8 *registers = w->registers;
    const u32 *a = (const u32 *)(registers + in->a), *b = (const u32 *)(registers + in->b);
    const u32 *c = (const u32 *)(registers + in->c);
    u32 moved[32], valid = 0;
    for (s32 i = 0; i < 32; i++) {
        s32 segment = c[i] >> 8 & 31, bound = c[i] & 31, count = b[i] & 31;
        s32 highest = (i & segment) | (bound & ~segment), origin;
        switch (in->flags) {
        case SHFL_IDX: origin = (i & segment) | (count & ~segment & 31); break;
        case SHFL_UP: origin = i - count; break;
        case SHFL_DOWN: origin = i + count; break;
        default: origin = i ^ count; break;
        }
        int inside = in->flags == SHFL_UP ? origin >= highest : origin <= highest;
        valid |= (u32)inside << i;
        moved[i] = a[inside ? origin : i];
    }
    u32 *d = (u32 *)(registers + in->d);
    LANES(d[i] = moved[i]);
    put_predicate(registers + in->count, active, valid);
}

static void do_vote(const warp *w, const instruction *in, u32 active)
{
    u32 votes = predicate_bits(w->registers + in->a);
    if (in->flags >> OPERATION_SHIFT)  // of the negated predicate
        votes = ~votes;
    votes &= active;
    int all = votes == active, any = votes != 0;
    u32 mode = in->flags & 3;
    if (mode == VOTE_BALLOT) {
        u32 *d = (u32 *)(w->registers + in->d);
        LANES(d[i] = votes);
        return;
    }
    int result = mode == VOTE_ALL ? all : mode == VOTE_ANY ? any : all || !any;
    put_predicate(w->registers + in->d, active, result ? ALL_LANES : 0);
}

static void do_convert_integer(const warp *w, const instruction *in, u32 active)
{
    u32 from = in->size, held = in->flags >> REGISTER_SHIFT & 0xFF;  // bytes of the two registers
    u32 origin = in->count & 0xFF, to = in->count >> 8 & 0xFF;       // bytes of the two types
    int origin_signed = in->count >> 16 & 1, to_signed = in->count >> 17 & 1;
    const u8 *a = w->registers + in->a;
    u8 *d = w->registers + in->d;
    LANES(u64 bits = load_bits(a + from * i, origin);
          if (origin_signed) bits = sign_extended(bits, origin);
          if (to < 8) bits &= (1ull << 8 * to) - 1;
          if (to_signed) bits = sign_extended(bits, to);
          memcpy(d + held * i, &bits, held));
}

static void do_pack(const warp *w, const instruction *in, u32 active)
{
    const u32 *list = w->grid->lists + in->a;
    u32 part = in->size;
    u64 packed[32] = {0};
    for (u32 k = 0; k < in->count; k++) {
        const u8 *from = w->registers + list[k];
        for (u32 i = 0; i < 32; i++)
            packed[i] |= load_bits(from + part * i, part) << 8 * part * k;
    }
    u32 whole = part * in->count;
    u8 *d = w->registers + in->d;
    LANES(memcpy(d + whole * i, packed + i, whole));
}

static void do_unpack(const warp *w, const instruction *in, u32 active)
{
    const u32 *list = w->grid->lists + in->d;
    u32 part = in->size, whole = part * in->count;
    u8 from[32 * 8];
    memcpy(from, w->registers + in->a, 32 * whole);  // the source may be among the destinations
    for (u32 k = 0; k < in->count; k++) {
        u8 *d = w->registers + list[k];
        LANES(memcpy(d + part * i, from + whole * i + part * k, part));
    }
}

// -------------------------------------------------------------------------------------------------------------- turns

static void exit_lanes(warp *w, u32 mask) { w->alive &= ~mask; }

// Runs the lanes machine.mask from machine.pc on, as Warp.run does. ESCAPED: Python must do the instruction at
// machine.pc. DIED: the warp has exited. NOTHING: its lanes are placed again.
static int run(machine *m, warp *w)
{
    const instruction *code = w->grid->code;
    u64 *counts = w->grid->counts;
    u8 *registers = w->registers;
    u32 pc = m->pc, mask = m->mask, stop = next_other(w, pc);
    u8 result[32];
    wait_word on;

    for (;;) {
        const instruction *in = code + pc;
        u32 active = mask;
        if (in->guard) {
            u32 set = predicate_bits(registers + in->guard_at);
            active &= in->guard == 1 ? set : ~set;
            if (!active)
                goto executed;
        }
        switch (in->op) {
        case OP_bra: {
            u32 target = in->d;
            counts[pc]++, w->progress++, m->turn_executed++;
            if (active != mask) {
                place(w, target, active, 0, NULL);
                place(w, pc + 1, mask & ~active, 0, NULL);
                return NOTHING;
            }
            pc = target;
            if (is_taken(w, pc) || m->turn_executed >= m->turn) {
                place(w, pc, mask, 0, NULL);
                return NOTHING;
            }
            stop = next_other(w, pc);
            continue;
        }
        case OP_ret:
            counts[pc]++, w->progress++, m->turn_executed++;
            exit_lanes(w, active);
            if (active != mask)
                place(w, pc + 1, mask & ~active, 0, NULL);
            return w->alive ? NOTHING : DIED;
        case OP_nop: break;
        case OP_nanosleep: w->gives_way = 1; break;
        case OP_timer: {
            u64 now = m->time_ns;
            u8 *d = registers + in->d;
            u32 size = in->size;
            LANES(memcpy(d + size * i, &now, size));
            break;
        }
            INTEGER(u16)
            INTEGER(u32)
            INTEGER(u64)
            SIGNED_INTEGER(u16, s16)
            SIGNED_INTEGER(u32, s32)
            SIGNED_INTEGER(u64, s64)
            WIDE(u16, u32)
            WIDE(s16, s32)
            WIDE(u32, u64)
            WIDE(s32, s64)
            BINARY(and_u8, u8, u8, x & y)
            BINARY(or_u8, u8, u8, x | y)
            BINARY(xor_u8, u8, u8, x ^ y)
            UNARY(not_u8, u8, u8, x ^ 1)
            BINARY(mul_hi_u32, u32, u32, (u64)x * y >> 32)
            BINARY(mul_hi_s32, s32, s32, (s64)x * y >> 32)
        case OP_lop3: {
            REGISTER(u32, d);
            REGISTER(const u32, a);
            REGISTER(const u32, b);
            REGISTER(const u32, c);
            u32 table = in->flags;
            LANES(d[i] = chosen_bits(a[i], b[i], c[i], table));
            break;
        }
            TERNARY(shf_l_wrap, u32, u32, u32, ((u64)y << 32 | x) << (z & 31) >> 32)
            TERNARY(shf_l_clamp, u32, u32, u32, z < 32 ? ((u64)y << 32 | x) << z >> 32 : x)
            TERNARY(shf_r_wrap, u32, u32, u32, ((u64)y << 32 | x) >> (z & 31))
            TERNARY(shf_r_clamp, u32, u32, u32, z < 32 ? ((u64)y << 32 | x) >> z : y)
            TERNARY(prmt, u32, u32, u32, permuted(x, y, z))
            TERNARY(bfe_u32, u32, u32, u32, extracted(x, y, z))
            UNARY(popc_u32, u32, u32, __builtin_popcount(x))
            UNARY(popc_u64, u32, u64, __builtin_popcountll(x))
            UNARY(clz_u32, u32, u32, x ? __builtin_clz(x) : 32)
            UNARY(clz_u64, u32, u64, x ? __builtin_clzll(x) : 64)
            UNARY(brev_u32, u32, u32, reversed(x))
            FLOATS(f32, SAME, canonical)
            FLOATS(f32_ftz, flushed, FLUSHED_RESULT)
            PACKED_FLOATS(f32x2, SAME, canonical)
            PACKED_FLOATS(f32x2_ftz, flushed, FLUSHED_RESULT)
            SETPS(u16)
            SETPS(s16)
            SETPS(u32)
            SETPS(s32)
            SETPS(u64)
            SETPS(s64)
            SETPS(f32)
            SETP(ne_u16, u16, x != y)
            SETP(ne_s16, s16, x != y)
            SETP(ne_u32, u32, x != y)
            SETP(ne_s32, s32, x != y)
            SETP(ne_u64, u64, x != y)
            SETP(ne_s64, s64, x != y)
            SETP(ne_f32, f32, x < y || x > y)
            SETP(equ_f32, f32, x == y || UNORDERED)
            SETP(neu_f32, f32, x != y)
            SETP(ltu_f32, f32, x < y || UNORDERED)
            SETP(leu_f32, f32, x <= y || UNORDERED)
            SETP(gtu_f32, f32, x > y || UNORDERED)
            SETP(geu_f32, f32, x >= y || UNORDERED)
            SETP(num_f32, f32, !UNORDERED)
            SETP(nan_f32, f32, UNORDERED)
        compared: {
            // In the order of setp: the other result is the negation, then both are combined with a predicate.
            REGISTER(u8, d);
            REGISTER(const u8, c);
            u8 *other = registers + in->count;
            u32 combine = in->flags & 3, inverted = (in->flags & INVERTED) != 0;
            for (u32 i = 0; i < 32; i++) {
                if (!(active >> i & 1))
                    continue;
                u8 first = result[i], second = !first, third = combine ? c[i] ^ inverted : 0;
                if (combine == COMBINE_AND)
                    first &= third, second &= third;
                else if (combine == COMBINE_OR)
                    first |= third, second |= third;
                else if (combine == COMBINE_XOR)
                    first ^= third, second ^= third;
                d[i] = first;
                if (in->flags & HAS_OTHER)
                    other[i] = second;
            }
            break;
        }
            TERNARY(selp_u16, u16, u16, u8, z ? x : y)
            TERNARY(selp_u32, u32, u32, u8, z ? x : y)
            TERNARY(selp_u64, u64, u64, u8, z ? x : y)
            UNARY(mov_u8, u8, u8, x)
            UNARY(mov_u16, u16, u16, x)
            UNARY(mov_u32, u32, u32, x)
            UNARY(mov_u64, u64, u64, x)
        case OP_mov_u128: {
            u8 *d = registers + in->d, *a = registers + in->a;
            LANES(memmove(d + 16 * i, a + 16 * i, 16));
            break;
        }
        case OP_pack: do_pack(w, in, active); break;
        case OP_unpack: do_unpack(w, in, active); break;
            UNARY(to_shared, u64, u64, x & ~SHARED_WINDOW)
            UNARY(from_shared, u64, u64, x | SHARED_WINDOW)
        case OP_cvt_int: do_convert_integer(w, in, active); break;
            UNARY(cvt_bf16_f32, u16, f32, to_bf16(x))
            UNARY(cvt_f16_f32, u16, f32, to_f16(x))
            BINARY(cvt_bf16x2_f32, u32, f32, (u32)to_bf16(x) << 16 | to_bf16(y))
            BINARY(cvt_f16x2_f32, u32, f32, (u32)to_f16(x) << 16 | to_f16(y))
            UNARY(cvt_f32_bf16, u32, u16, (u32)x << 16)
            UNARY(cvt_f32_f16, f32, u16, of_f16(x))
            UNARY(cvt_f32_s32, f32, s32, x)
            UNARY(cvt_f32_u32, f32, u32, x)
            UNARY(cvt_f32_s64, f32, s64, x)
            UNARY(cvt_f32_u64, f32, u64, x)
        case OP_cvt_int_f32: {
            REGISTER(const f32, a);
            u8 *d = registers + in->d;
            u32 held = in->flags >> REGISTER_SHIFT & 0xFF, how = in->count, size = in->size;
            int is_signed = (in->flags & SIGNED) != 0;
            LANES(u64 bits = rounded_to_integer(a[i], how, size, is_signed); memcpy(d + held * i, &bits, held));
            break;
        }
        case OP_ld:
            if (!do_load(w, in, active))
                goto escape;
            break;
        case OP_st:
            if (!do_store(m, w, in, active))
                goto escape;
            break;
        case OP_atom:
            if (!do_atom(m, w, in, active))
                goto escape;
            break;
        case OP_shfl:
        case OP_vote:
        case OP_elect:
        case OP_warp_sync: {
            const u32 *members = (const u32 *)(registers + in->value);
            u32 first = (u32)__builtin_ctz(active);
            if (lanes_missing(w, active, members[first])) {
                on = (wait_word){(u64)&w->progress, ~0ull, w->progress};
                goto blocked;
            }
            if (in->op == OP_shfl)
                do_shfl(w, in, active);
            else if (in->op == OP_vote)
                do_vote(w, in, active);
            else if (in->op == OP_elect) {
                u32 *d = (u32 *)(registers + in->d);
                LANES(d[i] = first);
                put_predicate(registers + in->a, active, 1u << first);
            }
            break;
        }
        case OP_try_wait: {
            int done = do_try_wait(w, in, active, &on);
            if (done < 0)
                goto blocked;
            if (!done)
                goto escape;
            break;
        }
        case OP_arrive:
            if (!do_arrive(m, w, in, active))
                goto escape;
            break;
        case OP_stmatrix:
            if (active != ALL_LANES || !do_stmatrix(m, w, in))
                goto escape;
            break;
        case OP_ldmatrix:
            if (active != ALL_LANES || !do_ldmatrix(w, in))
                goto escape;
            break;
        default:
        escape:
            m->pc = pc, m->mask = mask;
            return ESCAPED;
        }
    executed:
        counts[pc]++, w->progress++, m->turn_executed++;
        pc++;
        if (pc == stop || m->turn_executed >= m->turn || w->gives_way) {
            place(w, pc, mask, 0, NULL);
            return NOTHING;
        }
    }
blocked:
    w->blocked++;
    place(w, pc, mask, 1, &on);
    return NOTHING;
}

// What Python found the instruction at machine.pc to do. NOTHING: the split is placed; ESCAPED: it goes on.
static int take_outcome(machine *m, warp *w)
{
    u32 pc = m->pc;
    m->escaped = 0;
    if (m->outcome == BLOCKED) {
        w->blocked++;
        place(w, pc, m->mask, m->num_waits, m->waits);
        return NOTHING;
    }
    w->grid->counts[pc]++, w->progress++, m->turn_executed++;
    if (m->outcome == EXIT) {
        exit_lanes(w, m->mask);
        return w->alive ? NOTHING : DIED;
    }
    m->pc = pc = (u32)m->outcome;
    if (is_taken(w, pc) || m->turn_executed >= m->turn || w->gives_way) {
        place(w, pc, m->mask, 0, NULL);
        return NOTHING;
    }
    return ESCAPED;
}

// The rest of the turn of this warp, as Scheduler._turn has it.
static int turn(machine *m, warp *w)
{
    int event;
    if (m->escaped && (event = take_outcome(m, w)) != NOTHING) {
        if (event == DIED)
            return DIED;
        if ((event = run(m, w)) != NOTHING)
            return event;
    }
    while (m->turn_executed < m->turn && !w->gives_way) {
        u32 position = first_runnable(w);
        if (m->chosen != NONE && !is_parked(w->splits + m->chosen))
            position = m->chosen;
        m->chosen = NONE;
        if (position == NONE)
            break;
        m->pc = w->splits[position].pc;
        m->mask = w->splits[position].mask;
        remove_split(w, position);
        if ((event = run(m, w)) != NOTHING)
            return event;
    }
    return NOTHING;
}

// Rounds of turns, as Scheduler._round has them, until Python must do something: ESCAPED, the instruction of a warp;
// ADVANCE, a step of the asynchronous operation of this position; DIED, tell that a warp has exited; ROUND_ENDED, when
// warps have exited, nothing can run, or too much has.
int core_run(machine *m)
{
    int event;
    if (m->stage == AFTER_ADVANCE)
        goto next;
    while (m->stage == IN_TURN || m->stage == BETWEEN_ROUNDS) {
        if (m->stage == BETWEEN_ROUNDS) {
            for (u32 i = 0; i < m->num_warps; i++)
                m->order[i] = i;
            for (u32 last = m->num_warps - 1; last > 0; last--) {
                u32 other = below(m, last + 1), kept = m->order[last];
                m->order[last] = m->order[other];
                m->order[other] = kept;
            }
            m->position = 0, m->deaths = 0, m->ran = 0;
        }
        for (; m->position < m->num_warps; m->position++) {
            warp *w = m->warps[m->order[m->position]];
            if (m->stage != IN_TURN) {
                if (first_runnable(w) == NONE)
                    continue;
                m->turn = TURNS[below(m, sizeof TURNS / sizeof *TURNS)];
                m->chosen = NONE;
                if (w->num_splits > 1 && below(m, OUT_OF_TURN) == 0)
                    m->chosen = below(m, w->num_splits);
                w->gives_way = 0;
                m->turn_executed = 0;
                m->stage = IN_TURN;
            }
            event = turn(m, w);
            if (event == DIED)
                m->deaths++;
            if (event != NOTHING)
                return event;
            m->ran += m->turn_executed;
            m->stage = AFTER_ADVANCE;
            if (m->turn_executed && m->async_percent && below(m, 100) < m->async_percent && m->num_operations) {
                m->operation = below(m, m->num_operations);
                return ADVANCE;
            }
        next:;
        }
        m->stage = BETWEEN_ROUNDS;
        m->executed += m->ran;
        m->time_ns += m->ran;
        if (m->deaths || m->executed > m->max_steps)
            return ROUND_ENDED;
        if (m->ran == 0) {
            if (!m->num_operations)
                return ROUND_ENDED;
            m->operation = below(m, m->num_operations);
            return ADVANCE;
        }
    }
    return NOTHING;
}

u64 core_size(int which)
{
    static const u64 sizes[] = {sizeof(split), sizeof(cta), sizeof(warp), sizeof(machine), sizeof(instruction),
                                sizeof(allocation), sizeof(grid), sizeof(memory)};
    return sizes[which];
}
