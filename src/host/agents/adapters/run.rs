//! What every adapter gathers of a run.

use super::tools::Tools;
use super::{LONGEST_WORD, Outcome, told};
use crate::host::records::entry::{Failed, Status};
use crate::host::records::money::Dollars;

/// A run, as far as its program has told of it.
#[derive(Debug, Default)]
pub struct Run {
    pub conversation_id: Option<String>,
    pub model: Option<String>,
    pub tokens_in: u64,
    pub tokens_out: u64,
    pub tokens_cached: u64,
    pub cost: Option<Dollars>,
    pub tools: Tools,
    pub text: Option<String>,
}

impl Run {
    pub fn count(&mut self, tokens_in: u64, tokens_out: u64) {
        self.tokens_in = self.tokens_in.saturating_add(tokens_in);
        self.tokens_out = self.tokens_out.saturating_add(tokens_out);
    }

    pub fn pay(&mut self, cost: Dollars) {
        self.cost = Some(self.cost.unwrap_or_default() + cost);
    }

    /// The run is over, with an error or without.
    pub fn outcome(&mut self, error: Option<Failed>) -> Outcome {
        let run = std::mem::take(self);
        Outcome {
            conversation_id: run.conversation_id.map(|id| told(&id, LONGEST_WORD)),
            model: run.model.map(|model| told(&model, LONGEST_WORD)),
            tokens_in: run.tokens_in,
            tokens_out: run.tokens_out,
            tokens_cached: run.tokens_cached,
            cost: run.cost,
            tools: run.tools.into_all(),
            status: if error.is_some() { Status::Error } else { Status::Success },
            error,
            text: run.text,
        }
    }
}
