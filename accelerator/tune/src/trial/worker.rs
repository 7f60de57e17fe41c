//! The process of a trial: this program, started again.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::thread;

use accelerator_collective::internal::Token;
use accelerator_host::error::chain;
use rustix::process::Signal;

use super::protocol::{FromWorker, PeerRole, ToWorker, WorkerPlace, connect, receive};
use super::session::{BoxError, Link, Outcome, Trainable, TrialSession, run_class};
use crate::config::Config;
use crate::error::{Error, Kind, Result};

/// Carries out trials of a class and exits, in a process that a search has started; returns in any other.
pub(crate) fn serve_trainable<T: Trainable>() {
    let mut trained = None;
    serve(|session, config| run_class::<T>(&mut trained, session, config));
}

/// Carries out trials of a function and exits, in a process that a search has started; returns in any other.
pub(crate) fn serve_function(
    mut function: impl FnMut(&mut TrialSession, &Config) -> Result<(), BoxError>,
) {
    serve(|session, config| match function(session, config) {
        Err(_) if session.is_over() => Ok(Outcome::Done),
        ended => ended.map(|()| Outcome::Done),
    });
}

/// Carries trials out and exits, in a process that a search has started. `run` makes an attempt at one.
fn serve(mut run: impl FnMut(&mut TrialSession, &Config) -> Result<Outcome, BoxError>) {
    // What a worker starts does not inherit it, and may be a search of its own.
    let carried_out = match WorkerPlace::inherited() {
        Ok(None) => return,
        Ok(Some((place, token))) => carry_out(&place, &token, &mut run),
        Err(error) => Err(error),
    };
    let code = match carried_out {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("Error: {error}");
            1
        }
    };
    std::process::exit(code);
}

fn carry_out(
    place: &WorkerPlace,
    token: &Token,
    run: &mut impl FnMut(&mut TrialSession, &Config) -> Result<Outcome, BoxError>,
) -> Result<()> {
    // This only helps: the worker cannot reach a search that ended before, and one that ends later closes the
    // connection.
    if let Err(error) = rustix::process::set_parent_process_death_signal(Some(Signal::KILL)) {
        tracing::warn!("the system does not end this trial with what has started it: {error}");
    }
    let rank = accelerator_host::variable("RANK").and_then(|rank| rank.to_str()?.parse().ok());
    let link = join(place, token, rank.unwrap_or(0))?;
    while let ToWorker::Start(start) = link.next()? {
        link.send(&FromWorker::Started)?;
        let config = start.config.clone();
        let mut session = TrialSession::new(start, link.clone());
        let message = match catch_unwind(AssertUnwindSafe(|| run(&mut session, &config))) {
            Ok(Ok(Outcome::Done)) if session.is_over() => FromWorker::Stopped,
            Ok(Ok(Outcome::Done)) => FromWorker::Ended,
            Ok(Ok(Outcome::Refused)) => FromWorker::Refused,
            Ok(Err(error)) => FromWorker::Failed {
                message: chain(&*error),
            },
            Err(panic) => FromWorker::Failed {
                message: format!("it panicked: {}", panic_message(&*panic)),
            },
        };
        link.send(&message)?;
        if matches!(message, FromWorker::Failed { .. }) {
            // What it leaves behind is not known.
            return Err(Error::new(Kind::Trial, "the trial failed"));
        }
    }
    Ok(())
}

fn join(place: &WorkerPlace, token: &Token, rank: usize) -> Result<Link> {
    let role = PeerRole::Worker(place.worker);
    let (mut reader, stream) = connect(&place.address, token, role, rank)?;
    let (to_trial, messages) = channel();
    thread::Builder::new()
        .name("search".to_owned())
        .spawn(move || {
            while let Some(message) = receive(&mut reader) {
                if to_trial.send(message).is_err() {
                    return;
                }
            }
            // The search is gone, and nothing that this process does is of use, whatever it does.
            let _ = rustix::process::kill_process(rustix::process::getpid(), Signal::KILL);
        })?;
    Ok(Link::new(stream, messages))
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("without a message")
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// This test is started again, as a worker whose place cannot be read.
    #[test]
    fn a_worker_that_cannot_read_its_place_does_not_become_a_search() {
        const TEST: &str =
            "trial::worker::tests::a_worker_that_cannot_read_its_place_does_not_become_a_search";
        let variable = accelerator_host::TUNE_WORKER.name;
        if std::env::var_os(variable).is_some() {
            serve_function(|_, _| Ok(()));
            panic!("it continues as a search");
        }
        for content in ["", "{", r#"[{"address": "127.0.0.1:1", "worker": 0}, [1]]"#] {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", TEST, "--nocapture"]);
            command.stderr(std::process::Stdio::piped());
            let child = accelerator_collective::internal::spawn_with_inherited(
                command,
                variable,
                content.as_bytes(),
            );
            let output = child.unwrap().wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(1), "{content}: {said}");
            assert!(said.contains("cannot read which"), "{content}: {said}");
        }
    }
}
