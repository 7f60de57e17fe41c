use core::fmt;

use tracing::Span;

use super::Accelerator;
use crate::core::user_message;

/// Logs of this rank.
impl Accelerator {
    /// A span with `rank` and `world_size`, to be entered at the beginning of what this rank does: any
    /// subscriber shows it with every event of this thread.
    ///
    /// ```
    /// accelerator::launch(2, |accelerator| {
    ///     let _rank = accelerator.span().entered();
    ///     tracing::info!("training begins");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn span(&self) -> Span {
        let (rank, world_size) = (self.rank(), self.world_size());
        // At the level of errors, so that it is there whatever is filtered.
        tracing::error_span!("rank", rank, world_size)
    }

    /// Warns on rank 0, once for each text: of what every rank finds, such as a setting that does not
    /// fit. A program that collects no logs gets it on standard error.
    ///
    /// Nothing is communicated. What one rank alone finds is `tracing::warn!`'s.
    pub fn warn_once(&self, text: impl fmt::Display) {
        if self.is_main_process() {
            let text = text.to_string();
            if self.shared.warned.is_first(&text) {
                user_message::warn(&text);
            }
        }
    }
}
