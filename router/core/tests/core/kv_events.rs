//! Claims about KV events: who follows them knows what each prompt finds in the cache.

use std::collections::BTreeMap;

use plait_core::{KvEvent, PageHash, Plan, Scheduler, Settings, StoredPage, TokenId};
use proptest::prelude::*;

use crate::fixtures::{settings, with};
use crate::harness::{Harness, Spec};

/// The pages that a listener knows, by cache kind and hash.
#[derive(Default)]
struct Listener {
    pages: BTreeMap<(u32, PageHash), StoredPage>,
    events: Vec<KvEvent>,
}

impl Listener {
    /// Applies the events since the last call; returns how many pages were removed.
    fn follow(&mut self, scheduler: &mut Scheduler) -> usize {
        scheduler.take_kv_events(&mut self.events);
        let mut num_removed = 0;
        for event in self.events.drain(..) {
            match event {
                KvEvent::Stored(page) => {
                    let known = self.pages.insert((page.kind, page.hash), page);
                    assert_eq!(known, None, "a page is stored once until it is removed");
                }
                KvEvent::Removed { kind, hash } => {
                    let known = self.pages.remove(&(kind, hash));
                    assert!(known.is_some(), "only a stored page is removed");
                    num_removed += 1;
                }
            }
        }
        num_removed
    }

    /// Leading tokens of a prompt that the pages of one kind hold.
    fn num_found(&self, kind: u32, page_size: usize, prompt: &[TokenId], salt: u64) -> usize {
        let mut parent = None;
        let pages = prompt.chunks_exact(page_size).map_while(|tokens| {
            let mut known = self.pages.values();
            let page = known.find(|page| {
                (page.kind, page.parent, page.salt, &*page.tokens) == (kind, parent, salt, tokens)
            })?;
            parent = Some(page.hash);
            Some(page_size)
        });
        pages.sum()
    }
}

fn listening(num_pages: u32) -> Harness {
    let mut harness = Harness::new(small_pool(num_pages));
    harness.scheduler.record_kv_events();
    harness
}

fn small_pool(num_pages: u32) -> Settings {
    with(settings(), |it| {
        it.pages.page_size = 4;
        it.pages.prefix_cache = true;
        it.runtime.num_pages = num_pages;
        it.scheduler.max_queue = 64;
    })
}

fn prompt(first: TokenId, num_tokens: u32) -> Spec {
    let prompt = (0..num_tokens).map(|i| (first + i) % 61).collect();
    Spec {
        prompt,
        ..Spec::new(1, 2)
    }
}

#[test]
fn a_page_is_stored_with_its_tokens_and_parent() {
    let mut harness = listening(16);
    let salt = 7;
    harness
        .submit(Spec {
            salt,
            ..prompt(0, 9)
        })
        .unwrap();
    harness.run_to_the_end(1);
    let mut events = Vec::new();
    harness.scheduler.take_kv_events(&mut events);
    let [KvEvent::Stored(first), KvEvent::Stored(second)] = &events[..] else {
        panic!("not two pages: {events:?}");
    };
    assert_eq!((first.parent, second.parent), (None, Some(first.hash)));
    assert_eq!(
        (&*first.tokens, &*second.tokens),
        (&[0, 1, 2, 3][..], &[4, 5, 6, 7][..])
    );
    assert_eq!((first.salt, first.kind), (7, 0));
    let mut later = Vec::new();
    harness.scheduler.take_kv_events(&mut later);
    assert_eq!(later, [], "events are taken once");
}

#[test]
fn a_prompt_that_finds_its_pages_stores_none() {
    let mut harness = listening(16);
    let mut listener = Listener::default();
    for num_pages in [2, 2] {
        harness.submit(prompt(0, 9)).unwrap();
        harness.run_to_the_end(1);
        listener.follow(&mut harness.scheduler);
        assert_eq!(listener.pages.len(), num_pages);
    }
}

#[test]
fn nothing_is_recorded_unless_someone_listens() {
    let mut harness = Harness::new(small_pool(16));
    harness.submit(prompt(0, 9)).unwrap();
    harness.run_to_the_end(1);
    let mut events = Vec::new();
    harness.scheduler.take_kv_events(&mut events);
    assert_eq!(events, []);
}

/// Every prompt that a plan admits finds what the listener knows, if the plan itself changed nothing.
fn check_hits(harness: &Harness, listener: &Listener, plan: &Plan) {
    for slot in plan.new_slots.iter().filter(|slot| slot.waited.is_some()) {
        let spec = &harness.clients[&slot.request].spec;
        let usable = &spec.prompt[..spec.prompt.len() - 1];
        let found = listener.num_found(0, 4, usable, spec.salt);
        assert_eq!(slot.num_cached as usize, found, "{:?}", slot.request);
    }
}

proptest! {
    #[test]
    fn a_listener_predicts_what_every_prompt_finds(
        prompts in prop::collection::vec((0..3u32, 1..30u32, 0..2u64), 1..40),
        depth in 1..3usize,
        num_pages in 10..40u32,
    ) {
        let mut harness = listening(num_pages);
        let mut listener = Listener::default();
        for (first, num_tokens, salt) in prompts {
            harness.submit(Spec { salt, ..prompt(first, num_tokens) }).unwrap();
            listener.follow(&mut harness.scheduler);
            let plan = harness.plan();
            let known = listener.pages.len();
            let num_removed = listener.follow(&mut harness.scheduler);
            if let Some(plan) = plan.filter(|_| num_removed == 0 && listener.pages.len() == known) {
                check_hits(&harness, &listener, &plan);
            }
            while harness.num_in_flight() >= depth {
                harness.complete();
            }
        }
        harness.run_to_the_end(depth);
        listener.follow(&mut harness.scheduler);
        let cached = harness.scheduler.stats().pages.cached;
        prop_assert_eq!(listener.pages.len(), cached as usize, "an idle replica's pages are all known");
    }
}
