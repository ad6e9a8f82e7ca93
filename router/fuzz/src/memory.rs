//! Memory that is in use, and the most that was.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The system's allocator, which counts.
pub struct Counted;

static IN_USE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn add(num_bytes: usize) {
    let in_use = IN_USE.fetch_add(num_bytes, Relaxed) + num_bytes;
    PEAK.fetch_max(in_use, Relaxed);
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Relaxed);
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        add(size);
        IN_USE.fetch_sub(layout.size(), Relaxed);
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// Most bytes beyond those in use now that `work` has at a time, and what it gives.
pub fn peak_of<T>(work: impl FnOnce() -> T) -> (usize, T) {
    let before = IN_USE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let result = work();
    (PEAK.load(Relaxed).saturating_sub(before), result)
}
