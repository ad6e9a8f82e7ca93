//! The pools of a replica's caches, by what its ranks have room for.

use plait_core::{PageSettings, RuntimeSettings};
use plait_proto::{Hello, PageKind};

/// Pages and snapshots of a replica at most, of all kinds. The scheduler keeps about 60 bytes of each.
const MAX_PAGES: u64 = 1 << 26;
/// Bytes of a rank's pages and snapshots at most: 1 PiB, more than any device has.
const MAX_POOL_BYTES: u64 = 1 << 50;

/// The least that any rank has room for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaPools {
    /// Of the first kind of pages.
    pub num_pages: u32,
    /// The other kinds.
    pub other_kinds: Vec<PageKind>,
    /// Snapshots of slot state; None for a model that keeps none.
    pub num_snapshots: Option<u32>,
}

impl ReplicaPools {
    /// One kind of pages.
    pub fn of_pages(num_pages: u32) -> Self {
        Self {
            num_pages,
            other_kinds: Vec::new(),
            num_snapshots: None,
        }
    }

    /// Of ranks that keep the same kinds. A replica has at least one rank.
    pub fn of(hellos: &[Hello]) -> Self {
        let least = |num: fn(&Hello) -> Option<u32>| hellos.iter().filter_map(num).min();
        let num_pages = least(|hello| Some(hello.num_pages));
        Self {
            num_pages: num_pages.expect("a replica has at least one rank"),
            other_kinds: other_kinds(hellos),
            num_snapshots: least(|hello| Some(hello.slot_state?.num_snapshots)),
        }
    }

    /// What new ranks lack of what the lost ones had.
    pub fn missing(&self, before: &RuntimeSettings) -> Option<String> {
        let others = before.other_kinds.iter().map(|kind| kind.num_pages);
        let pages_before: Vec<u32> = std::iter::once(before.num_pages).chain(others).collect();
        let others = self.other_kinds.iter().map(|kind| kind.num_pages);
        let pages: Vec<u32> = std::iter::once(self.num_pages).chain(others).collect();
        let is_enough = pages.len() == pages_before.len()
            && pages
                .iter()
                .zip(&pages_before)
                .all(|(now, before)| now >= before)
            && self.num_snapshots >= before.num_snapshots;
        let snapshots =
            |num: Option<u32>| num.map_or_else(String::new, |num| format!(" and {num} snapshots"));
        (!is_enough).then(|| {
            format!(
                "the ranks that were started again have {pages:?} pages of the KV cache{}, those before had \
                 {pages_before:?}{}: another process took memory; free it, or give --num-pages",
                snapshots(self.num_snapshots),
                snapshots(before.num_snapshots),
            )
        })
    }

    /// The same with as many of each as the lost ranks had.
    pub fn like(self, before: &RuntimeSettings) -> Self {
        let kinds = self.other_kinds.into_iter().zip(&before.other_kinds);
        Self {
            num_pages: before.num_pages,
            other_kinds: kinds
                .map(|(kind, before)| PageKind {
                    num_pages: before.num_pages,
                    ..kind
                })
                .collect(),
            num_snapshots: before.num_snapshots,
        }
    }
}

/// The page kinds after the first, each with the least number of pages that any rank has room for.
fn other_kinds(hellos: &[Hello]) -> Vec<PageKind> {
    let mut kinds = hellos
        .first()
        .map_or_else(Vec::new, |hello| hello.other_kinds.clone());
    for hello in hellos {
        for (least, kind) in kinds.iter_mut().zip(&hello.other_kinds) {
            least.num_pages = least.num_pages.min(kind.num_pages);
        }
    }
    kinds
}

/// What the settings ask for: a rank has no more.
#[derive(Clone, Copy, Debug, Default)]
pub struct AskedPools {
    num_pages: Option<u32>,
    num_snapshots: Option<u32>,
}

impl AskedPools {
    /// Of a replica.
    pub fn new(pages: &PageSettings) -> Self {
        Self {
            num_pages: pages.num_pages,
            num_snapshots: pages.num_snapshots,
        }
    }

    /// Why no pool can be as large as a rank says.
    pub fn problem(&self, rank: u32, hello: &Hello) -> Option<String> {
        let num_snapshots = hello.slot_state.map_or(0, |it| it.num_snapshots);
        let counts = [
            (
                hello.num_pages,
                self.num_pages,
                "pages of the KV cache",
                "num-pages",
            ),
            (
                num_snapshots,
                self.num_snapshots,
                "snapshots of slot state",
                "num-snapshots",
            ),
        ];
        for (num, asked, of_what, flag) in counts {
            if let Some(asked) = asked.filter(|asked| num > *asked) {
                return Some(format!(
                    "rank {rank} has {num} {of_what}, and --{flag} asks for {asked}: install worker and engine from one \
                     release"
                ));
            }
        }
        let (num_pages, num_bytes) = pool_size(hello);
        if num_pages > MAX_PAGES {
            return Some(format!(
                "rank {rank} has {num_pages} pages of the KV cache; up to {MAX_PAGES} are allowed: raise --page-size or \
                 lower --num-pages"
            ));
        }
        (num_bytes > MAX_POOL_BYTES).then(|| {
            format!(
                "rank {rank} has {num_pages} pages of the KV cache, {num_bytes} bytes; up to {MAX_POOL_BYTES} are \
                 allowed: install worker and engine from one release"
            )
        })
    }
}

/// Pages and snapshots of all kinds and their bytes; a sum that does not fit is the largest number.
fn pool_size(hello: &Hello) -> (u64, u64) {
    let first = (hello.num_pages, hello.page_bytes);
    let others = hello.other_kinds.iter();
    let kinds = others.map(|kind| (kind.num_pages, kind.page_bytes));
    let slot_state = hello.slot_state.iter();
    let snapshots = slot_state.map(|it| (it.num_snapshots, it.snapshot_bytes));
    kinds
        .chain(snapshots)
        .chain([first])
        .fold((0, 0), |(pages, bytes), (num, size)| {
            let num = u64::from(num);
            (pages + num, bytes.saturating_add(num.saturating_mul(size)))
        })
}
