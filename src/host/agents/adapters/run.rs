//! Run state common to all adapters.

use super::tools::ToolCalls;
use super::{MAX_ID_CHARS, Outcome, scrub_and_truncate};
use crate::records::entry::{DispatchError, ResultStatus};
use crate::records::money::Dollars;

/// Run state, as reported by the agent program so far.
#[derive(Debug, Default)]
pub struct RunState {
    pub conversation_id: Option<String>,
    pub model: Option<String>,
    pub tokens_in: u64,
    pub tokens_out: u64,
    pub tokens_cached: u64,
    pub cost: Option<Dollars>,
    pub has_unreported_usage: bool,
    pub tools: ToolCalls,
    pub text: Option<String>,
}

impl RunState {
    pub fn add_tokens(&mut self, tokens_in: u64, tokens_out: u64) {
        self.tokens_in = self.tokens_in.saturating_add(tokens_in);
        self.tokens_out = self.tokens_out.saturating_add(tokens_out);
    }

    pub fn add_cost(&mut self, cost: Dollars) {
        self.cost = Some(self.cost.unwrap_or_default() + cost);
    }

    /// Sets the agent's latest text.
    pub fn set_text(&mut self, text: &str) {
        self.tools.record_model_output();
        self.text = Some(text.to_owned());
    }

    /// Finishes the run. If the error has no tool, it gets the one returned by [`ToolCalls::close`]; a missing turn
    /// defaults to the last one.
    pub fn finish(&mut self, at_ms: u64, error: Option<DispatchError>) -> Outcome {
        let mut run = std::mem::take(self);
        let (failed_tool, turn) = (run.tools.close(at_ms), run.tools.turn());
        let error = error.map(|error| DispatchError {
            tool: error.tool.or(failed_tool),
            turn: error.turn.or(turn),
            ..error
        });
        Outcome {
            conversation_id: run.conversation_id.map(|id| scrub_and_truncate(&id, MAX_ID_CHARS)),
            model: run.model.map(|model| scrub_and_truncate(&model, MAX_ID_CHARS)),
            tokens_in: run.tokens_in,
            tokens_out: run.tokens_out,
            tokens_cached: run.tokens_cached,
            cost: run.cost,
            has_unreported_usage: run.has_unreported_usage,
            tools: run.tools.into_recorded(),
            status: if error.is_some() { ResultStatus::Error } else { ResultStatus::Success },
            error,
            text: run.text,
        }
    }
}
