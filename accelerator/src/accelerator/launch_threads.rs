use std::panic::{AssertUnwindSafe, catch_unwind};

use accelerator_collective::ProcessGroup;
use accelerator_host::sync::Mutex;

use crate::accelerator::Accelerator;
use crate::core::error::{Error, Kind, Result};
use crate::core::panic_text::panic_text;

/// Runs `body` on `world_size` ranks, each a thread of this process, and returns what they
/// return, in rank order.
///
/// This is how a notebook or a unit test runs a training function on several ranks. Settings go
/// through [`Accelerator::builder`], whose `launch` is the same.
///
/// Burn's CPU random generator is one for the whole process, so what ranks draw from it at the
/// same time is not reproducible. Build models with [`Accelerator::init`], which builds one at a time;
/// for reproducible dropout, use processes.
///
/// ```
/// let ranks = accelerator::launch(3, |accelerator| {
///     let all = accelerator.gather_object(&accelerator.rank())?;
///     assert_eq!(all, [0, 1, 2]);
///     Ok(accelerator.rank())
/// })?;
/// assert_eq!(ranks, [0, 1, 2]);
/// # Ok::<(), accelerator::Error>(())
/// ```
///
/// # Errors
///
/// The error or panic of the rank that failed first; the others are ended by it.
pub fn launch<T, F>(world_size: usize, body: F) -> Result<Vec<T>>
where
    T: Send,
    F: Fn(Accelerator) -> Result<T> + Send + Sync,
{
    Accelerator::builder().launch(world_size, body)
}

/// Runs `body` with each group on a thread of its own.
pub(crate) fn run<T, F>(groups: Vec<ProcessGroup>, body: F) -> Result<Vec<T>>
where
    T: Send,
    F: Fn(ProcessGroup) -> Result<T> + Send + Sync,
{
    // In the order in which ranks ended: the first failure is the cause of the others.
    let failures = Mutex::new(Vec::new());
    let results: Vec<Option<T>> = std::thread::scope(|scope| {
        let threads: Vec<_> = groups
            .into_iter()
            .map(|group| {
                let (body, failures) = (&body, &failures);
                let rank = group.rank();
                let (member, aborted) = (group.clone(), group.clone());
                let work = move || {
                    let outcome = catch_unwind(AssertUnwindSafe(|| body(group)));
                    let panicked = outcome.is_err();
                    let error = match outcome {
                        Ok(Ok(value)) => return Some(value),
                        Ok(Err(error)) => error,
                        Err(panic) => Error::new(
                            Kind::Panic,
                            format!("rank {rank} panicked: {}", panic_text(&*panic)),
                        ),
                    };
                    // Noted before the group is left, so that no consequence can come first.
                    let reason = format!("it returned an error: {error:?}");
                    failures.lock().push((rank, error));
                    // A group that failed before keeps its cause.
                    match panicked {
                        true => aborted.abort_by_panic(),
                        false => aborted.abort(reason),
                    }
                    None
                };
                std::thread::Builder::new()
                    .name(format!("rank {rank}"))
                    .spawn_scoped(scope, move || {
                        let value = work();
                        // The last handle: only now do the other ranks learn that this one left.
                        drop(member);
                        value
                    })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.ok().and_then(|thread| thread.join().ok()).flatten())
            .collect()
    });
    if let Some((rank, error)) = failures.into_inner().into_iter().next() {
        tracing::debug!(rank, %error, "the first rank that failed");
        return Err(error);
    }
    let count = results.len();
    let values: Vec<T> = results.into_iter().flatten().collect();
    if values.len() != count {
        return Err(Error::new(
            Kind::Panic,
            format!(
                "{} of {count} ranks could not be started as threads",
                count - values.len()
            ),
        ));
    }
    Ok(values)
}
