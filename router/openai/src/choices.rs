//! The choices of an answer: those of its first prompt, then those of the others.

use std::num::NonZeroU32;

use crate::choice_state::{ChoiceState, ResponseContext};
use crate::logprobs::TokenLogprobs;
use crate::response_head::TokenCounts;

/// What is known of one prompt token; None before it was measured, and of the first one.
pub(crate) type PromptScores = Vec<Option<TokenLogprobs>>;

/// All choices. What is said of a prompt is said once, by the rows of its first choice.
#[derive(Debug)]
pub(crate) struct Choices {
    states: Vec<ChoiceState>,
    /// Choices of each prompt.
    num_of_each: usize,
    /// Of each prompt: one for each token if the request asked for them, else empty.
    prompt_scores: Vec<PromptScores>,
    /// Of each choice of a call for embeddings, once it is there.
    embeddings: Vec<Vec<f32>>,
}

impl Choices {
    pub(crate) fn new(
        context: &ResponseContext,
        states: Vec<ChoiceState>,
        num_of_each: NonZeroU32,
    ) -> Self {
        let is_scored = context.report.prompt_logprobs.is_some() || context.num_echoed().is_some();
        let num_of_each = num_of_each.get() as usize;
        let firsts = states.iter().step_by(num_of_each);
        let prompt_scores = firsts.map(|it| match is_scored {
            true => vec![None; it.prompt.len()],
            false => Vec::new(),
        });
        Self {
            prompt_scores: prompt_scores.collect(),
            embeddings: match context.report.embedding {
                Some(_) => vec![Vec::new(); states.len()],
                None => Vec::new(),
            },
            num_of_each,
            states,
        }
    }

    pub(crate) fn get(&self, index: usize) -> &ChoiceState {
        &self.states[index]
    }

    pub(crate) fn get_mut(&mut self, index: usize) -> &mut ChoiceState {
        &mut self.states[index]
    }

    /// Each choice with its prompt's scores.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&ChoiceState, &PromptScores)> {
        let each = self.states.chunks(self.num_of_each);
        let prompts = each.zip(&self.prompt_scores);
        prompts.flat_map(|(states, scores)| states.iter().map(move |it| (it, scores)))
    }

    /// The first choice of each prompt.
    fn firsts(&self) -> impl Iterator<Item = &ChoiceState> {
        self.states.iter().step_by(self.num_of_each)
    }

    pub(crate) fn have_ended(&self) -> bool {
        self.states.iter().all(|it| it.ended.is_some())
    }

    /// What all cost: a prompt once for all its choices.
    pub(crate) fn counts(&self, context: &ResponseContext) -> TokenCounts {
        let num_cached = self.firsts().map(|it| it.num_cached_tokens).sum();
        let thoughts = self.states.iter().map(|it| it.num_thought_tokens(context));
        TokenCounts {
            num_prompt: self.firsts().map(|it| it.prompt.len() as u64).sum(),
            num_cached: context.tells_cached.then_some(num_cached),
            num_output: self.states.iter().map(|it| it.num_tokens).sum(),
            num_thought: thoughts.sum(),
        }
    }

    /// Takes the records of the prompt tokens from `first_position` on.
    pub(crate) fn set_scores(
        &mut self,
        index: usize,
        first_position: u32,
        records: &[TokenLogprobs],
    ) {
        let scores = &mut self.prompt_scores[index / self.num_of_each];
        let scores = scores.iter_mut().skip(first_position as usize);
        for (score, record) in scores.zip(records) {
            *score = Some(record.clone());
        }
    }

    /// Takes the pooled hidden states of a choice's prompt.
    pub(crate) fn set_embedding(&mut self, index: usize, embedding: Vec<f32>) {
        if let Some(place) = self.embeddings.get_mut(index) {
            *place = embedding;
        }
    }

    pub(crate) fn embeddings(&self) -> &[Vec<f32>] {
        &self.embeddings
    }

    /// Notes how much of a prompt the prefix cache had. What its other choices find is the first one's.
    pub(crate) fn set_cached_tokens(&mut self, index: usize, num_tokens: u64) {
        if index.is_multiple_of(self.num_of_each) {
            for state in &mut self.states[index..index + self.num_of_each] {
                state.num_cached_tokens = num_tokens;
            }
        }
    }
}
