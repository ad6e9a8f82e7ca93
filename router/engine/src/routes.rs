//! Which replica has which stream.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use plait_core::{
    Availability, HashSeed, HashedPrompt, MovedRequest, PromptHasher, ReplicaRouter, Request,
    Route, TokenId,
};
use rustc_hash::FxHashMap;

use crate::output_queue::StreamId;

/// Tokens that an answer counts for at most: most are shorter than what they ask for.
const MAX_OUTPUT_TOKENS: u32 = 256;

/// Chooses a replica for each stream, and knows it until the stream ends.
#[derive(Debug)]
pub struct Routes {
    state: Mutex<State>,
    /// None if prompts need no hashes: there is one replica, or no prefix cache.
    hasher: Option<PromptHasher>,
}

#[derive(Debug)]
struct State {
    router: ReplicaRouter,
    streams: FxHashMap<StreamId, Route>,
}

impl Routes {
    /// No streams. Pages are hashed with `hash_key` if prompts share them.
    pub fn new(num_replicas: u32, page_size: u32, hash_key: Option<HashSeed>) -> Self {
        let hash_key = hash_key.filter(|_| num_replicas > 1);
        Self {
            state: Mutex::new(State {
                router: ReplicaRouter::new(num_replicas, page_size),
                streams: FxHashMap::default(),
            }),
            hasher: hash_key.map(|key| PromptHasher::new(key, page_size)),
        }
    }

    /// The replica for a stream with these requests; None if all have failed.
    pub fn choose<'a>(
        &self,
        stream: StreamId,
        requests: impl Iterator<Item = &'a Request>,
    ) -> Option<u32> {
        let requests: Vec<&Request> = requests.collect();
        let num_output_tokens: u64 = requests
            .iter()
            .map(|request| {
                let each = request.max_tokens.min(MAX_OUTPUT_TOKENS);
                u64::from(each) * u64::from(request.num_choices.get())
            })
            .sum();
        let prompts = self.hash_prompts(requests.iter().map(|it| (&it.prompt, it.salt)));
        let mut state = self.lock();
        let route = state.router.route(&prompts, num_output_tokens)?;
        state.streams.insert(stream, route);
        Some(route.replica)
    }

    /// Another replica for a stream whose own one has no ranks, or its own if there is none; None if that is closed.
    pub fn move_away<'a>(
        &self,
        stream: StreamId,
        requests: impl Iterator<Item = &'a MovedRequest>,
    ) -> Option<u32> {
        let requests: Vec<&MovedRequest> = requests.collect();
        let most_tokens = requests.iter().map(|it| it.most_tokens()).max();
        let left = requests.iter().map(|it| it.num_left());
        let num_output_tokens = left.map(|num| u64::from(num.min(MAX_OUTPUT_TOKENS))).sum();
        let mut prompts = self.hash_prompts(requests.iter().map(|it| (it.prompt(), it.salt())));
        for (prompt, request) in prompts.iter_mut().zip(&requests) {
            prompt.num_tokens += u64::from(request.num_output());
        }
        let State { router, streams } = &mut *self.lock();
        let route = streams.get_mut(&stream)?;
        let most_tokens = most_tokens.unwrap_or(0);
        *route = router.move_away(*route, &prompts, num_output_tokens, most_tokens)?;
        Some(route.replica)
    }

    /// Whether another replica takes streams of this one whose requests come to so many tokens.
    pub fn has_other(&self, replica: u32, most_tokens: u64) -> bool {
        self.lock().router.has_other(replica, most_tokens)
    }

    /// Where a stream is; None if it has ended or was not routed yet.
    pub fn replica_of(&self, stream: StreamId) -> Option<u32> {
        let state = self.lock();
        state.streams.get(&stream).map(|route| route.replica)
    }

    /// A stream's first token has come.
    pub fn begin_answer(&self, stream: StreamId) {
        let State { router, streams } = &mut *self.lock();
        if let Some(route) = streams.get_mut(&stream) {
            router.begin_answer(route);
        }
    }

    /// A stream has ended, or will never begin.
    pub fn finish(&self, stream: StreamId) {
        let mut state = self.lock();
        if let Some(route) = state.streams.remove(&stream) {
            state.router.finish(route);
        }
    }

    /// A replica has so many pages, in which a request of so many tokens fits.
    pub fn set_pool(&self, replica: u32, num_pages: u32, pool_tokens: u64) {
        let router = &mut self.lock().router;
        router.set_pool(replica, num_pages, pool_tokens);
    }

    /// Whether a replica takes streams.
    pub fn set_availability(&self, replica: u32, availability: Availability) {
        self.lock().router.set_availability(replica, availability);
    }

    fn hash_prompts<'a>(
        &self,
        prompts: impl Iterator<Item = (&'a Arc<[TokenId]>, u64)>,
    ) -> Vec<HashedPrompt> {
        let mut hasher = self.hasher.clone();
        let hash = |(prompt, salt): (&'a Arc<[TokenId]>, u64)| match &mut hasher {
            Some(hasher) => hasher.hash(prompt, salt),
            None => HashedPrompt {
                pages: Vec::new(),
                num_tokens: prompt.len() as u64,
            },
        };
        prompts.map(hash).collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
