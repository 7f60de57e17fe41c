use core::fmt;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use tracing::Span;

use super::Accelerator;
use crate::core::agreement;
use crate::core::error::{Error, Kind, Result, panic_text};

/// Prints a line on rank 0, as [`Accelerator::print`] does, from the arguments of [`println!`].
///
/// ```
/// use accelerator::prelude::*;
///
/// let accelerator = Accelerator::new()?;
/// let (epoch, loss) = (3, 0.25);
/// print_main!(accelerator, "epoch {epoch}: loss {loss:.4}");
/// # Ok::<(), Error>(())
/// ```
#[macro_export]
macro_rules! print_main {
    ($accelerator:expr, $($argument:tt)+) => {
        $accelerator.print(::core::format_args!($($argument)+))
    };
}

/// Control of which ranks run what, and in which order.
impl Accelerator {
    /// Returns true on rank 0.
    pub fn is_main_process(&self) -> bool {
        self.topology().is_main()
    }

    /// Prints a line on rank 0 only. A closed standard output is not an error.
    pub fn print(&self, line: impl fmt::Display) {
        if self.is_main_process() {
            // One call, so that lines of several processes do not mix.
            let _ = std::io::stdout().write_all(format!("{line}\n").as_bytes());
        }
    }

    /// Runs `work` on one rank after the other, in rank order. The first begins when all ranks have called this
    /// method, each other when the one before has ended, and it returns when all are done. Every rank must call it.
    ///
    /// Lines that ranks log come in the order of ranks if all write to one terminal or file. A launcher that
    /// collects the output of each rank, as `accel-launch` does, may still mix lines that come at almost the
    /// same time: if the order of lines is all that matters, [gather](Self::gather_object) them, and
    /// [print](Self::print) them on rank 0: one operation for all ranks instead of one per rank.
    ///
    /// ```
    /// accelerator::launch(2, |accelerator| {
    ///     let lines = accelerator.gather_object(&format!("rank {} is ready", accelerator.rank()))?;
    ///     accelerator.print(lines.join("\n"));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    ///
    /// A collective inside `work` returns an error at once. What `work` returns, an error included, stays on this
    /// rank. When it panics, the panic is resumed on this rank, the other ranks get an error, and later ranks do not
    /// run `work`.
    ///
    /// ```
    /// accelerator::launch(2, |accelerator| {
    ///     let _rank = accelerator.span().entered();
    ///     accelerator.in_rank_order(|| tracing::info!("{} is ready", accelerator.backend_kind()))
    /// })?;
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_collective`](crate::Error::is_collective) when another rank is lost or calls something
    /// else, before any rank has run `work` in the latter case; [`Error::is_panic`](crate::Error::is_panic)
    /// when `work` panicked on another rank.
    #[track_caller]
    pub fn in_rank_order<T>(&self, work: impl FnOnce() -> T) -> Result<T> {
        let group = &self.shared.context.group;
        group.barrier()?;
        let mut work = Some(work);
        let mut mine = None;
        for turn in 0..self.world_size() {
            let work = if turn == self.rank() {
                work.take()
            } else {
                None
            };
            let ended = work.map(|work| {
                let work = AssertUnwindSafe(|| self.busy_alone(work));
                catch_unwind(work)
            });
            let failure = match &ended {
                Some(Err(panic)) => Some(Error::new(Kind::Panic, panic_text(&**panic))),
                _ => None,
            };
            let told = agreement::take_turn(group, turn, failure.as_ref(), IN_TURN);
            match ended {
                Some(Ok(value)) => mine = Some(value),
                Some(Err(panic)) => resume_unwind(panic),
                None => {}
            }
            told?;
        }
        // Each rank has had its turn.
        mine.ok_or_else(|| Error::misuse("this rank had no turn"))
    }

    /// Runs `work` on rank 0 only.
    ///
    /// The other ranks do not take part, so a collective inside `work` would wait for them forever:
    /// it returns an error at once instead. If they come to their next collective before `work` is done,
    /// they wait as in [`main_process_first`](Self::main_process_first).
    ///
    /// ```
    /// let seen = accelerator::launch(2, |accelerator| {
    ///     Ok(accelerator.on_main_process(|| "rank 0 was here"))
    /// })?;
    /// assert_eq!(seen, [Some("rank 0 was here"), None]);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn on_main_process<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        self.on_process(0, work)
    }

    /// Runs `work` only on the rank with this local number, on each host; number 0 is the first rank of a host. See
    /// [`on_main_process`](Self::on_main_process).
    pub fn on_local_process<T>(&self, local_rank: usize, work: impl FnOnce() -> T) -> Option<T> {
        (self.topology().local_rank() == local_rank).then(|| self.busy_alone(work))
    }

    /// Runs `work` on that rank only; see [`on_main_process`](Self::on_main_process).
    pub fn on_process<T>(&self, rank: usize, work: impl FnOnce() -> T) -> Option<T> {
        (self.rank() == rank).then(|| self.busy_alone(work))
    }

    /// Runs `work` on rank 0, and after it has succeeded there, on the other ranks: the first rank downloads or
    /// unpacks, and the others find the result. They wait as long as the process of rank 0 lives, for at most the
    /// [busy timeout](crate::AcceleratorBuilder::busy_timeout), which restarts with each
    /// [`keep_alive`](Self::keep_alive) of `work`.
    ///
    /// ```
    /// accelerator::launch(2, |accelerator| {
    ///     accelerator.main_process_first(|| Ok(()))
    /// })?;
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The error of `work` on this rank. If it failed on rank 0, or panicked, every other rank gets an
    /// error of the same kind with that message, and does not run it.
    #[track_caller]
    pub fn main_process_first<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let group = &self.shared.context.group;
        if self.is_main_process() {
            return self.first(work, |failure| {
                agreement::send(group, failure.map_or(Ok(()), Err))
            });
        }
        agreement::receive(group, FIRST)?;
        self.busy(work)
    }

    /// Runs `work` on the first rank of each host, and after it has succeeded on all of those, on the other ranks. An
    /// archive, for example, is unpacked to each host's disk once.
    ///
    /// # Errors
    ///
    /// The error of `work` on this rank. If it failed on the first rank of a host, every other rank
    /// of every host gets an error of the same kind with that message, and those that are not the first
    /// of theirs do not run it.
    #[track_caller]
    pub fn local_main_process_first<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let group = &self.shared.context.group;
        if self.topology().is_local_main() {
            return self.first(work, |failure| {
                agreement::exchange(group, failure.as_ref(), FIRST)
            });
        }
        agreement::exchange(group, None, FIRST)?;
        self.busy(work)
    }

    /// Tells the other ranks that this one is still working, during long work that they do not share. They wait for
    /// it in their next collective for at most the [progress timeout](crate::AcceleratorBuilder::progress_timeout)
    /// after the last such call. It sends nothing by itself, costs next to nothing, and may be called by any thread.
    ///
    /// The library calls it for each piece that it writes, reads or hashes itself. A closure that runs on some
    /// ranks only, as that of [`on_main_process`](Self::on_main_process) or
    /// [`main_process_first`](Self::main_process_first), need not: its rank counts as one that works, for at
    /// most the [busy timeout](crate::AcceleratorBuilder::busy_timeout) after the closure's beginning or its
    /// last call of this.
    ///
    /// ```
    /// use core::time::Duration;
    /// use accelerator::Accelerator;
    ///
    /// let builder = Accelerator::builder().progress_timeout(Duration::from_secs(1));
    /// builder.launch(2, |accelerator| {
    ///     if accelerator.is_main_process() {
    ///         for _file in 0..24 {
    ///             std::thread::sleep(Duration::from_millis(50)); // unpack one
    ///             accelerator.keep_alive();
    ///         }
    ///     }
    ///     accelerator.wait_for_everyone()
    /// })?;
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn keep_alive(&self) {
        self.shared.context.group.activity().keep_alive();
    }

    /// Waits until every rank has called it.
    ///
    /// ```
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("vocabulary.txt");
    /// let read = accelerator::launch(2, |accelerator| {
    ///     accelerator.on_main_process(|| std::fs::write(&path, "a b c")).transpose()?;
    ///     accelerator.wait_for_everyone()?;
    ///     Ok(std::fs::read_to_string(&path)?)
    /// })?;
    /// assert_eq!(read, ["a b c"; 2]);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_collective`](crate::Error::is_collective) when one does not.
    #[track_caller]
    pub fn wait_for_everyone(&self) -> Result<()> {
        Ok(self.shared.context.group.barrier()?)
    }

    /// Runs what others wait for, and tells them how it went, panics too.
    #[track_caller]
    fn first<T>(
        &self,
        work: impl FnOnce() -> Result<T>,
        tell: impl FnOnce(Option<Error>) -> Result<()>,
    ) -> Result<T> {
        let ended = catch_unwind(AssertUnwindSafe(|| self.busy_alone(work)));
        let failure = match &ended {
            Ok(outcome) => outcome.as_ref().err().cloned(),
            Err(panic) => Some(Error::new(Kind::Panic, panic_text(&**panic))),
        };
        let told = tell(failure);
        let value = ended.unwrap_or_else(|panic| resume_unwind(panic))?;
        told?;
        Ok(value)
    }

    /// Runs a closure of the program on one rank, which others may wait for. It need not show that it works.
    fn busy_alone<T>(&self, work: impl FnOnce() -> T) -> T {
        self.busy(|| self.shared.context.alone(work))
    }

    /// Counts as one that works while the closure runs.
    fn busy<T>(&self, work: impl FnOnce() -> T) -> T {
        let _busy = (self.world_size() > 1).then(|| self.shared.context.group.activity().busy());
        work()
    }
}

const FIRST: &str = "do what it does first here";

const IN_TURN: &str = "do what it does in its turn here";

/// Logs of this rank.
impl Accelerator {
    /// Returns a span with `rank` and `world_size`. Enter it at the beginning of this rank's work, and any subscriber
    /// shows it with every event of this thread.
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
}
