//! `accel-launch test`: whether this installation works on this machine.
//!
//! Every stage runs in processes of this very program (`rank/`), so that none can hang or crash
//! the test. This side starts them, reads their output and checks it (`stage.rs`). The processes of a stage end with
//! it, however it went.

mod args;
mod chaos;
mod context;
mod rank;
mod ranks;
mod results;
mod stage;
mod timing;

use std::process::ExitCode;
use std::time::Instant;

use crate::error::{Error, Result};
use crate::text::print;
use args::Stage;
pub(crate) use args::{RankArgs, TestArgs};
use context::{Context, Interrupt};
use results::{StageFailure, TestReport};

/// Runs the test.
///
/// # Errors
/// When nothing can be tested at all; what is found wrong is in the exit code.
pub(crate) fn run(arguments: &TestArgs) -> Result<ExitCode> {
    let context = Context {
        interrupt: Interrupt::listen()?,
        program: std::env::current_exe()
            .map_err(|error| Error::system("this program cannot find itself").with_source(error))?,
        arguments: arguments.clone(),
    };
    let started = Instant::now();
    let mut report = TestReport::new(arguments.num_processes);
    if arguments.chaos {
        if !chaos::run(&context, &mut report)? {
            return interrupted(context.interrupt.signal().unwrap_or_default());
        }
        return conclude(report, started, arguments);
    }
    let mut can_connect = true;
    for stage in Stage::chosen(&arguments.stage) {
        let began = Instant::now();
        let outcome = match stage.needs_rendezvous() && !can_connect {
            false => stage.run(&context),
            true => Err(StageFailure::Skipped("the processes did not meet".into())),
        };
        can_connect &= stage != Stage::Rendezvous || outcome.is_ok();
        if let Some(signal) = context.interrupt.signal() {
            return interrupted(signal);
        }
        let line = report.add(stage.name(), outcome, began.elapsed());
        context.show(line)?;
    }
    if arguments.timing {
        let began = Instant::now();
        let outcome = timing::measure(&context);
        if let Some(signal) = context.interrupt.signal() {
            return interrupted(signal);
        }
        let outcome = outcome.map(|times| {
            let text = times.to_string();
            report.set_times(&times);
            text
        });
        let line = report.add("timing", outcome, began.elapsed());
        context.show(line)?;
    }
    conclude(report, started, arguments)
}

/// Runs a rank of the test; the exit code is its result, and its output what it found.
pub(crate) fn rank(arguments: &RankArgs) -> ExitCode {
    rank::run(arguments)
}

fn conclude(mut report: TestReport, started: Instant, arguments: &TestArgs) -> Result<ExitCode> {
    report.seconds = started.elapsed().as_secs_f64();
    match arguments.json {
        true => print(&report.to_json())?,
        false => print(&report.summary())?,
    };
    Ok(ExitCode::from(u8::from(!report.ok)))
}

fn interrupted(signal: i32) -> Result<ExitCode> {
    let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
    print(&format!(
        "ended by {name}; no process of the test is left\n"
    ))?;
    Ok(ExitCode::from(
        u8::try_from(128 + signal).unwrap_or(u8::MAX),
    ))
}
