//! Routing as `plait serve` does it: the same router, told when requests end.

use plait_core::{PromptHasher, ReplicaRouter, RequestId, Route};
use rustc_hash::FxHashMap;

use crate::replica::Replica;
use crate::settings::{HASH_SEED, Routing, Setup};
use crate::trace::Arrival;

/// Output tokens that count for a request at most, as in the engine.
const MAX_OUTPUT_TOKENS: u32 = 256;

/// The router, and the choices whose requests have not ended.
pub struct Routes {
    router: ReplicaRouter,
    hasher: PromptHasher,
    open: FxHashMap<(usize, RequestId), Route>,
    last: Option<Route>,
}

impl Routes {
    /// For idle replicas; None if the setup routes otherwise.
    pub fn new(setup: &Setup) -> Option<Self> {
        if setup.routing != Routing::PrefixAware {
            return None;
        }
        let page_size = setup.scheduler.pages.page_size;
        let mut router = ReplicaRouter::new(setup.num_replicas, page_size);
        for replica in 0..setup.num_replicas {
            let num_pages = setup.scheduler.runtime.num_pages;
            let pool_tokens = u64::from(num_pages) * u64::from(page_size);
            router.set_pool(replica, num_pages, pool_tokens);
        }
        Some(Self {
            router,
            hasher: PromptHasher::new(HASH_SEED, page_size),
            open: FxHashMap::default(),
            last: None,
        })
    }

    /// The replica for a request; call [`Routes::begin`] when it has it.
    pub fn choose(&mut self, arrival: &Arrival, replicas: &mut [Replica<'_>]) -> usize {
        for (index, replica) in replicas.iter_mut().enumerate() {
            for request in replica.take_begun() {
                if let Some(route) = self.open.get_mut(&(index, request)) {
                    self.router.begin_answer(route);
                }
            }
            for request in replica.take_ended() {
                if let Some(route) = self.open.remove(&(index, request)) {
                    self.router.finish(route);
                }
            }
        }
        let prompt = self.hasher.hash(&arrival.prompt(), 0);
        let num_output = arrival.num_output.min(MAX_OUTPUT_TOKENS);
        let route = self.router.route(&[prompt], num_output.into());
        let route = route.expect("no replica is ever closed");
        self.last = Some(route);
        route.replica as usize
    }

    /// The replica has queued the request, or refused it.
    pub fn begin(&mut self, index: usize, request: Option<RequestId>) {
        let Some(route) = self.last.take() else {
            return;
        };
        match request {
            Some(request) => {
                self.open.insert((index, request), route);
            }
            None => self.router.finish(route),
        }
    }
}
