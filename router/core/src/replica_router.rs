//! Which of several replicas takes a request: the one on which its first token costs least.
//!
//! A request costs the tokens that a replica has still to compute, in flight and queued, and those of its own
//! prompt that the replica does not hold. A conversation so stays where its prefix is until waiting there costs
//! more than computing the prefix elsewhere.

use std::sync::Arc;

use crate::held_pages::HeldPages;
use crate::ids::TokenId;
use crate::prefix_hasher::{HashSeed, PageHash, PrefixHasher};

/// Computes the hashes of a prompt's full pages, as the prefix cache does.
#[derive(Clone, Debug)]
pub struct PromptHasher {
    hasher: PrefixHasher,
    page_size: usize,
}

impl PromptHasher {
    /// Hashes pages of `page_size` tokens.
    pub fn new(seed: HashSeed, page_size: u32) -> Self {
        Self {
            hasher: PrefixHasher::new(seed),
            page_size: page_size as usize,
        }
    }

    /// The prompt with its hashes. The page of the last token never hits: that token must be computed.
    pub fn hash(&mut self, prompt: &Arc<[TokenId]>, salt: u64) -> HashedPrompt {
        let num_cacheable = prompt.len().saturating_sub(1);
        let full = prompt[..num_cacheable].chunks_exact(self.page_size);
        let mut parent = self.hasher.root(salt);
        let pages = full.map(|tokens| {
            parent = self.hasher.child(parent, tokens);
            parent
        });
        HashedPrompt {
            pages: pages.collect(),
            num_tokens: prompt.len() as u64,
        }
    }
}

/// A prompt as routing sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HashedPrompt {
    /// Hashes of its full pages; none if nothing is cached.
    pub pages: Vec<PageHash>,
    /// Its tokens.
    pub num_tokens: u64,
}

/// A choice, until [`ReplicaRouter::finish`] takes its load back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Which replica.
    pub replica: u32,
    /// Tokens of the prompts that it must compute before the first answer begins.
    num_prompt_tokens: u64,
    /// Tokens of the answers, as far as is known.
    num_output_tokens: u64,
}

impl Route {
    /// What the requests still add to the replica's load.
    pub fn num_tokens(&self) -> u64 {
        self.num_prompt_tokens + self.num_output_tokens
    }
}

/// Whether a replica takes requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Availability {
    /// It does.
    Open,
    /// Only if none is open: it is late.
    Avoided,
    /// Never again.
    Closed,
}

#[derive(Clone, Debug)]
struct Replica {
    availability: Availability,
    /// Tokens in flight and queued.
    load: u64,
    num_routed: u64,
    held: HeldPages,
    pool_tokens: u64,
}

impl Replica {
    fn takes(&self, wanted: Availability, most_tokens: u64) -> bool {
        self.availability == wanted && self.pool_tokens >= most_tokens
    }
}

/// The loads and pages of all replicas.
#[derive(Clone, Debug)]
pub struct ReplicaRouter {
    page_size: u64,
    replicas: Vec<Replica>,
}

impl ReplicaRouter {
    /// So many replicas, idle, that hold no page yet.
    pub fn new(num_replicas: u32, page_size: u32) -> Self {
        let replica = Replica {
            availability: Availability::Open,
            load: 0,
            num_routed: 0,
            held: HeldPages::default(),
            pool_tokens: 0,
        };
        Self {
            page_size: page_size.into(),
            replicas: vec![replica; num_replicas as usize],
        }
    }

    /// A replica has so many pages, in which a request of so many tokens fits.
    pub fn set_pool(&mut self, replica: u32, num_pages: u32, pool_tokens: u64) {
        let replica = &mut self.replicas[replica as usize];
        replica.held.resize(num_pages as usize);
        replica.pool_tokens = pool_tokens;
    }

    /// Whether a replica takes requests from now on; one that is closed stays so.
    pub fn set_availability(&mut self, replica: u32, availability: Availability) {
        let replica = &mut self.replicas[replica as usize];
        if replica.availability != Availability::Closed {
            replica.availability = availability;
        }
    }

    /// The replica for these prompts, which stay together, and for answers of so many tokens; None if all
    /// are closed. Of equals the one that got fewer requests so far.
    pub fn route(&mut self, prompts: &[HashedPrompt], num_output_tokens: u64) -> Option<Route> {
        let best = self.best_of(Availability::Open, 0, prompts);
        let (index, num_prompt_tokens) =
            best.or_else(|| self.best_of(Availability::Avoided, 0, prompts))?;
        Some(self.load(index, num_prompt_tokens, prompts, num_output_tokens))
    }

    fn load(
        &mut self,
        index: usize,
        num_prompt_tokens: u64,
        prompts: &[HashedPrompt],
        num_output_tokens: u64,
    ) -> Route {
        let route = Route {
            replica: u32::try_from(index).expect("replicas are a u32"),
            num_prompt_tokens,
            num_output_tokens,
        };
        let chosen = &mut self.replicas[index];
        chosen.load += route.num_tokens();
        chosen.num_routed += 1;
        for prompt in prompts {
            chosen.held.touch(&prompt.pages);
        }
        route
    }

    /// Another replica for a choice whose own one has no ranks: one that is open, and holds the most tokens that one of
    /// its requests may come to. Without one the choice stays; where its replica is closed, it goes to one that is
    /// late, and None says that there is none.
    pub fn move_away(
        &mut self,
        route: Route,
        prompts: &[HashedPrompt],
        num_output_tokens: u64,
        most_tokens: u64,
    ) -> Option<Route> {
        let own = &self.replicas[route.replica as usize];
        let is_closed = own.availability == Availability::Closed;
        let open = self.best_of(Availability::Open, most_tokens, prompts);
        let best = open.or_else(|| {
            let late = || self.best_of(Availability::Avoided, most_tokens, prompts);
            is_closed.then(late).flatten()
        });
        let Some((index, num_prompt_tokens)) = best else {
            return (!is_closed).then_some(route);
        };
        self.finish(route);
        Some(self.load(index, num_prompt_tokens, prompts, num_output_tokens))
    }

    /// Whether a replica is open that holds a request of so many tokens, and is another.
    pub fn has_other(&self, replica: u32, most_tokens: u64) -> bool {
        let mut others = (0..)
            .zip(&self.replicas)
            .filter(|(index, _)| *index != replica);
        others.any(|(_, other)| other.takes(Availability::Open, most_tokens))
    }

    /// The first token of a choice has come, so its prompts are computed.
    pub fn begin_answer(&mut self, route: &mut Route) {
        let num_computed = std::mem::take(&mut route.num_prompt_tokens);
        self.replicas[route.replica as usize].load -= num_computed;
    }

    /// All requests of a choice have ended.
    pub fn finish(&mut self, route: Route) {
        self.replicas[route.replica as usize].load -= route.num_tokens();
    }

    fn best_of(
        &self,
        wanted: Availability,
        most_tokens: u64,
        prompts: &[HashedPrompt],
    ) -> Option<(usize, u64)> {
        let candidates = self.replicas.iter().enumerate();
        candidates
            .filter(|(_, replica)| replica.takes(wanted, most_tokens))
            .map(|(index, replica)| (index, replica, self.num_new_tokens(replica, prompts)))
            .min_by_key(|(_, replica, num_new)| (replica.load + num_new, replica.num_routed))
            .map(|(index, _, num_new)| (index, num_new))
    }

    /// Tokens of the prompts that a replica must compute.
    fn num_new_tokens(&self, replica: &Replica, prompts: &[HashedPrompt]) -> u64 {
        let new = prompts.iter().map(|prompt| {
            let num_held = replica.held.num_held(&prompt.pages) as u64;
            prompt.num_tokens - num_held * self.page_size
        });
        new.sum()
    }
}
