// Shadow memory of the race detector: for every four bytes of memory who wrote them last and who has read them since.
//
// An event is one execution of an instruction, or one step of an asynchronous operation: a slot of the vector clocks, an
// epoch in it, and the place in the program. Whoever holds a clock whose entry for the slot has reached the epoch comes
// after the event. Cells hold the numbers of events; the sets of readers are immutable lists that cells share, so that
// the cells of a tile cost one decision. Everything that needs no loop over cells is in races.py.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { ASYNC = 1, STRONG = 2, TENSOR = 4, GLOBAL = 8 };           // flags of an event
enum { RACE = 1, SCOPE = 2, PROXY = 3, UNINITIALISED = 4, TENSOR_FENCE = 5 };  // what a conflict is
enum { CTA_SCOPE, CLUSTER_SCOPE, GPU_SCOPE, SYS_SCOPE };
enum { PAGE_CELLS = 1024, CACHED = 4096, MOST_READERS = 64 };

typedef struct {
    uint32_t slot, epoch;
    uint32_t place;      // of the program, as races.py numbers them
    uint32_t actor;      // the warp that did or issued it
    uint32_t cta, rank;
    uint32_t flags, scope;
} event;

typedef struct {
    event self;
    // What comes before this access: the actor's own past, the past of its pipe, and a clock.
    uint32_t own_slot, own_epoch, pipe_slot, pipe_epoch;
    const uint32_t *happened;
    const uint32_t *visible;  // of what happened, what the async proxy (or tensor memory) has been told of
    uint32_t num_happened, num_visible;
    uint32_t writes, must_be_written;
} access;

typedef struct {
    uint64_t address;
    uint32_t kind, before, after, before_writes;
} conflict;

typedef struct {
    uint32_t write, readers;
    uint8_t mask;     // bytes of the last write
    uint8_t written;  // bytes that were ever written
} cell;

typedef struct {
    uint32_t event, parent;
    uint32_t mask;
} reader;

typedef struct {
    uint64_t number;  // of the page, plus one; 0: free
    cell *cells;
} page;

typedef struct {
    event *events;
    uint32_t num_events, max_events;
    reader *readers;
    uint32_t num_readers, max_readers;
    page *pages;
    uint64_t num_pages, max_pages;
    page last;
    uint32_t cache[CACHED];
} shadow;

shadow *shadow_create(void) {
    shadow *s = calloc(1, sizeof *s);
    s->max_events = s->max_readers = 1024;
    s->max_pages = 64;
    s->events = calloc(s->max_events, sizeof *s->events);
    s->readers = calloc(s->max_readers, sizeof *s->readers);
    s->pages = calloc(s->max_pages, sizeof *s->pages);
    s->num_events = s->num_readers = 1;  // 0: none
    return s;
}

void shadow_destroy(shadow *s) {
    for (uint64_t i = 0; i < s->max_pages; i++) free(s->pages[i].cells);
    free(s->pages);
    free(s->readers);
    free(s->events);
    free(s);
}

void shadow_event(const shadow *s, uint32_t number, event *into) { *into = s->events[number]; }

static page *find_page(page *pages, uint64_t max_pages, uint64_t number) {
    uint64_t at = (number * 0x9E3779B97F4A7C15ull >> 20) & (max_pages - 1);
    while (pages[at].number && pages[at].number != number + 1) at = (at + 1) & (max_pages - 1);
    return &pages[at];
}

static cell *cells_of(shadow *s, uint64_t number) {
    if (s->last.number == number + 1) return s->last.cells;
    page *found = find_page(s->pages, s->max_pages, number);
    if (!found->number) {
        if (2 * ++s->num_pages > s->max_pages) {
            page *larger = calloc(2 * s->max_pages, sizeof *larger);
            for (uint64_t i = 0; i < s->max_pages; i++)
                if (s->pages[i].number) *find_page(larger, 2 * s->max_pages, s->pages[i].number - 1) = s->pages[i];
            free(s->pages);
            s->pages = larger;
            s->max_pages *= 2;
            found = find_page(s->pages, s->max_pages, number);
        }
        found->number = number + 1;
        found->cells = calloc(PAGE_CELLS, sizeof(cell));
    }
    s->last = *found;
    return found->cells;
}

// The number of this event; equal ones share a number.
static uint32_t event_number(shadow *s, const event *e) {
    uint32_t at = (e->slot * 2654435761u ^ e->epoch * 40503u ^ e->place * 97u) % CACHED;
    uint32_t cached = s->cache[at];
    if (cached && !memcmp(&s->events[cached], e, sizeof *e)) return cached;
    if (s->num_events == s->max_events) {
        s->max_events *= 2;
        s->events = realloc(s->events, s->max_events * sizeof *s->events);
    }
    s->events[s->num_events] = *e;
    return s->cache[at] = s->num_events++;
}

static int reached(const uint32_t *clock, uint32_t size, const event *e) {
    return e->slot < size && clock[e->slot] >= e->epoch;
}

static int before(const access *a, const event *e) {
    return (e->slot == a->own_slot && e->epoch <= a->own_epoch) ||
           (e->slot == a->pipe_slot && e->epoch <= a->pipe_epoch) || reached(a->happened, a->num_happened, e);
}

// Two strong accesses never race when each one's scope includes the other.
static int scopes_meet(const event *e, const event *f) {
    if (e->cta == f->cta) return 1;
    uint32_t least = e->rank == f->rank ? CLUSTER_SCOPE : SYS_SCOPE;
    return e->scope >= least && f->scope >= least;
}

// 0, or what is wrong with this access after event e.
static int judge(const access *a, const event *e, int e_writes) {
    if (!before(a, e)) {
        if (e->flags & a->self.flags & STRONG) return scopes_meet(e, &a->self) ? 0 : SCOPE;
        return RACE;
    }
    if (e->flags & a->self.flags & TENSOR)
        return e->actor == a->self.actor || reached(a->visible, a->num_visible, e) ? 0 : TENSOR_FENCE;
    if (e_writes && (a->self.flags & ASYNC)) {
        // Within a CTA the async proxy keeps its own order; everything else crosses from one proxy to the other.
        int crosses = !(e->flags & ASYNC) || ((e->flags & GLOBAL) && e->cta != a->self.cta);
        if (crosses && !reached(a->visible, a->num_visible, e)) return PROXY;
    }
    return 0;
}

static uint32_t add_reader(shadow *s, uint32_t event, uint32_t mask, uint32_t parent) {
    if (s->num_readers == s->max_readers) {
        s->max_readers *= 2;
        s->readers = realloc(s->readers, s->max_readers * sizeof *s->readers);
    }
    s->readers[s->num_readers] = (reader){event, parent, mask};
    return s->num_readers++;
}

// The readers with this one added, without those that come before it.
static uint32_t with_reader(shadow *s, uint32_t readers, const access *a, uint32_t self, uint32_t mask) {
    uint32_t kept[MOST_READERS];
    uint32_t count = 0;
    for (uint32_t at = readers; at; at = s->readers[at].parent) {
        const reader *r = &s->readers[at];
        if (r->event == self && !(mask & ~r->mask)) return readers;
        if ((r->mask & ~mask) || !before(a, &s->events[r->event]))
            if (count < MOST_READERS) kept[count++] = at;
    }
    uint32_t chain = 0;
    while (count) {
        const reader r = s->readers[kept[--count]];
        chain = add_reader(s, r.event, r.mask, chain);
    }
    return add_reader(s, self, mask, chain);
}

typedef struct {
    conflict *into;
    uint32_t room, count;
} conflicts;

static void report(conflicts *c, uint64_t address, int kind, uint32_t e, uint32_t self, int e_writes) {
    for (uint32_t i = 0; i < c->count; i++)
        if (c->into[i].before == e && c->into[i].kind == (uint32_t)kind) return;
    if (c->count < c->room) c->into[c->count++] = (conflict){address, kind, e, self, e_writes};
}

// One access to ``count`` stretches of ``size`` bytes, each at its address. Returns the number of conflicts in ``into``.
uint32_t shadow_access(shadow *s, const access *a, const uint64_t *addresses, uint64_t count, uint64_t size,
                       conflict *into, uint32_t room) {
    conflicts found = {into, room, 0};
    uint32_t self = event_number(s, &a->self);
    uint32_t good_write = 0, good_readers = 0;  // judged and found good
    uint32_t old_readers = ~0u, old_mask = 0, new_readers = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t at = addresses[i], end = at + size;
        while (at < end) {
            cell *c = &cells_of(s, at >> 12)[at >> 2 & (PAGE_CELLS - 1)];
            uint64_t next = (at & ~3ull) + 4;
            uint32_t mask = (0xF << (at & 3)) & 0xF;
            if (next > end) mask &= 0xF >> (next - end);
            if (c->write && c->write != good_write && c->write != self && (c->mask & mask)) {
                int kind = judge(a, &s->events[c->write], 1);
                if (kind) report(&found, at, kind, c->write, self, 1);
                else good_write = c->write;
            }
            if (a->writes) {
                if (c->readers && c->readers != good_readers) {
                    int good = 1;
                    for (uint32_t r = c->readers; r; r = s->readers[r].parent) {
                        if (!(s->readers[r].mask & mask) || s->readers[r].event == self) continue;
                        int kind = judge(a, &s->events[s->readers[r].event], 0);
                        if (kind) report(&found, at, kind, s->readers[r].event, self, 0), good = 0;
                    }
                    if (good && mask == 0xF) good_readers = c->readers;
                }
                c->write = self;
                c->mask = mask;
                c->written |= mask;
                if (mask == 0xF) c->readers = 0;
            } else {
                if (a->must_be_written && (mask & ~c->written)) report(&found, at, UNINITIALISED, 0, self, 0);
                if (c->readers != old_readers || mask != old_mask) {
                    old_readers = c->readers;
                    old_mask = mask;
                    new_readers = with_reader(s, c->readers, a, self, mask);
                }
                c->readers = new_readers;
            }
            at = next;
        }
    }
    return found.count;
}

// These bytes count as never written, and nobody has read them: new memory at an old address.
void shadow_forget(shadow *s, uint64_t address, uint64_t size) {
    for (uint64_t at = address & ~3ull; at < address + size; at += 4)
        memset(&cells_of(s, at >> 12)[at >> 2 & (PAGE_CELLS - 1)], 0, sizeof(cell));
}
