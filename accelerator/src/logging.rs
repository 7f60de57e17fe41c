//! Logs of several ranks: shows the rank of each event, and selects the ranks that log.
//!
//! This library logs by [`tracing`], as Burn does; a program chooses what becomes of it. With
//! `tracing-subscriber`, [`layer`] writes to standard error, with the rank in front of each event:
//!
//! ```
//! use accelerator::logging::{self, LogRanks};
//! use tracing_subscriber::prelude::*;
//!
//! # fn main() -> accelerator::Result<()> {
//! // What rank 0 says, and warnings and errors of every rank.
//! tracing_subscriber::registry()
//!     .with(tracing_subscriber::filter::LevelFilter::INFO)
//!     .with(logging::layer(LogRanks::Main)?)
//!     .init();
//! # Ok(())
//! # }
//! ```
//!
//! Nothing here communicates, so that logging cannot hang: lines of different ranks come in the order of
//! time. [`Accelerator::in_rank_order`](crate::Accelerator::in_rank_order), which every rank calls, lets the ranks log
//! one after the other.
//!
//! Ranks that are threads of one process share a subscriber, and none of this knows them apart: there,
//! enter [`Accelerator::span`](crate::Accelerator::span).

use std::fmt;
use std::io::IsTerminal;

use accelerator_collective::{Launch, Topology};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::fmt::format::{Format, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::{Context, Filter, Layer};
use tracing_subscriber::registry::LookupSpan;

use crate::core::error::Result;

/// The ranks whose events up to `INFO` are shown. Warnings and errors of every rank are always shown, since they may
/// concern one rank alone.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum LogRanks {
    /// Rank 0.
    #[default]
    Main,
    /// The first rank of each host. Every rank, if its local rank
    /// [is not known yet](Topology::is_local_known).
    LocalMain,
    /// Every rank.
    Every,
}

/// Returns a layer that writes the events of these ranks to standard error, in `tracing-subscriber`'s usual format
/// with the rank in front. Colours are only for terminals.
///
/// # Errors
///
/// [`Error::is_config`](crate::Error::is_config) when the environment says something impossible about
/// this process's rank, as [`Accelerator::new`](crate::Accelerator::new) would find.
pub fn layer<S>(speakers: LogRanks) -> Result<impl Layer<S>>
where
    S: Subscriber + for<'span> LookupSpan<'span>,
{
    let topology = Launch::from_env()?.topology;
    let layer = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .event_format(RankFormat::new(&topology, Format::default()));
    Ok(layer.with_filter(RankFilter::new(speakers, &topology)))
}

/// Lets through what these ranks say.
#[derive(Clone, Copy, Debug)]
struct RankFilter {
    speaks: bool,
}

impl RankFilter {
    fn new(speakers: LogRanks, topology: &Topology) -> Self {
        let speaks = match speakers {
            LogRanks::Main => topology.is_main(),
            LogRanks::LocalMain => topology.is_local_main(),
            LogRanks::Every => true,
        };
        Self { speaks }
    }

    fn shows(self, metadata: &Metadata<'_>) -> bool {
        // Spans are the context of warnings too.
        self.speaks || metadata.is_span() || *metadata.level() <= Level::WARN
    }
}

impl<S> Filter<S> for RankFilter {
    fn enabled(&self, metadata: &Metadata<'_>, _context: &Context<'_, S>) -> bool {
        self.shows(metadata)
    }
}

/// Puts `rank=N` in front of what another format writes, if there are several ranks.
#[derive(Clone, Debug)]
struct RankFormat<F> {
    inner: F,
    /// `None` for one that is alone.
    rank: Option<usize>,
}

impl<F> RankFormat<F> {
    /// Makes a format for the rank of `topology` that wraps `inner`.
    fn new(topology: &Topology, inner: F) -> Self {
        Self {
            inner,
            rank: (topology.world_size() > 1).then(|| topology.rank()),
        }
    }
}

impl<S, N, F> FormatEvent<S, N> for RankFormat<F>
where
    S: Subscriber + for<'span> LookupSpan<'span>,
    N: for<'writer> FormatFields<'writer> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        if let Some(rank) = self.rank {
            write!(writer, "rank={rank} ")?;
        }
        self.inner.format_event(context, writer, event)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::sync::Arc;

    use accelerator_host::sync::Mutex;
    use tracing_subscriber::prelude::*;

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Returns the output that the rank of `topology` shows of `work`.
    fn shown(topology: &Topology, speakers: LogRanks, work: impl FnOnce()) -> String {
        let lines = Lines::default();
        let writer = lines.clone();
        let layer = tracing_subscriber::fmt::layer()
            .with_writer(move || writer.clone())
            .with_ansi(false)
            .event_format(RankFormat::new(
                topology,
                Format::default().without_time().with_target(false),
            ))
            .with_filter(RankFilter::new(speakers, topology));
        let subscriber = tracing_subscriber::registry().with(layer);
        tracing::subscriber::with_default(subscriber, work);
        let bytes = lines.0.lock().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn those_who_do_not_speak_warn_all_the_same() {
        let of = |rank, speakers| {
            let topology = Topology::new(rank, 4).unwrap();
            let topology = topology.with_local(rank % 2, 2).unwrap();
            shown(&topology, speakers, || {
                let _step = tracing::info_span!("step", number = 7).entered();
                tracing::info!("loaded");
                tracing::warn!("slow");
            })
        };
        let info = |rank: usize| format!("rank={rank}  INFO step{{number=7}}: loaded\n");
        let warning = |rank: usize| format!("rank={rank}  WARN step{{number=7}}: slow\n");
        for (speakers, speaking) in [
            (LogRanks::Main, [true, false, false, false]),
            (LogRanks::LocalMain, [true, false, true, false]),
            (LogRanks::Every, [true; 4]),
        ] {
            for (rank, speaks) in speaking.into_iter().enumerate() {
                let own = if speaks { info(rank) } else { String::new() };
                assert_eq!(of(rank, speakers), own + &warning(rank));
            }
        }
    }

    #[test]
    fn one_process_has_no_rank_to_show() {
        let text = shown(&Topology::single(), LogRanks::Main, || {
            tracing::info!("alone")
        });
        assert_eq!(text, " INFO alone\n");
    }

    #[cfg(feature = "flex")]
    #[test]
    fn a_span_shows_the_rank() {
        let texts = crate::launch(2, |accelerator| {
            Ok(shown(&Topology::single(), LogRanks::Every, || {
                let _rank = accelerator.span().entered();
                tracing::info!("done");
            }))
        })
        .unwrap();
        let text = |rank| format!(" INFO rank{{rank={rank} world_size=2}}: done\n");
        assert_eq!(texts, [text(0), text(1)]);
    }
}
