//! `accel-launch tune`.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, Signal};

use crate::support::{Folder, Run, wait_until};

const LAUNCHER: &str = env!("CARGO_BIN_EXE_accel-launch");

const SPEC: &str = r#"
name = "parabola"
metric = "loss"
mode = "min"
num_samples = 6
order = { ordered = { workers = 2 } }
[space]
lr = { uniform = [0.01, 0.4] }
steps = 8
[scheduler]
type = "asha"
max_t = 8
reduction_factor = 2
"#;

/// A program that descends a parabola and prints the loss after each step.
const PROGRAM: &str = "BEGIN { x = 5; for (i = 0; i < steps; i++) { x -= lr * 2 * x; print \"step\", i; printf \"{\\\"loss\\\": %.9f}\\n\", x * x } }";

#[test]
fn any_program_that_prints_json_lines_is_tuned() {
    let folder = Folder::new();
    folder.write("spec.toml", SPEC);
    let program = PROGRAM.replace('{', "{{").replace('}', "}}");
    let tune = |name: &str, slots: usize| {
        let line = format!("tune spec.toml --folder {name} --slots {slots}");
        let mut command = folder.command(&line);
        command.args(["--", "awk", "-v", "lr={lr}", "-v", "steps={steps}"]);
        command.arg(&program);
        Run::start(command).end()
    };
    let ended = tune("two", 2).expect(0);
    let ended = ended.prints("Number of trials: 6/6 (6 TERMINATED)");
    let said = ended.text();
    let best = said
        .lines()
        .find_map(|line| line.strip_prefix("Best config is: "))
        .unwrap();
    folder.launch("tune best two").expect(0).prints(best);
    let show = |line: &str| folder.json(line);
    let shown = show("tune best two --json");
    assert_eq!(shown["config"].to_string(), best);
    assert_eq!(shown["training_iteration"], 8);
    assert!(shown["trial"].as_str().unwrap().starts_with("parabola_"));
    let listed = show("tune list . --json");
    assert_eq!(listed[0]["status"], "finished");
    assert_eq!(listed[0]["ended"], 6);
    let rows = show("tune show two --json");
    let lowest = rows
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["best_loss"].as_f64().unwrap());
    let lowest = lowest.fold(f64::INFINITY, f64::min);
    assert_eq!(listed[0]["best"].as_f64().unwrap(), lowest);
    assert_eq!(shown["value"].as_f64().unwrap(), lowest);
    tune("two", 2)
        .prints("This search ended at 20")
        .prints("nothing was run");
    // Slots beyond the number of workers change nothing.
    tune("four", 4).expect(0);
    let decisions =
        |name: &str| fs::read(folder.path().join(name).join("decisions.jsonl")).unwrap();
    assert_eq!(decisions("two"), decisions("four"));
    // In a job of two processes, the second is the agent of the first.
    let mut job = folder.command(&format!(
        "--num-processes 2 {LAUNCHER} tune spec.toml --folder job --slots 2 -- sh -c"
    ));
    job.arg("env | grep -E '^(RANK|WORLD_SIZE|MASTER_ADDR|ACCEL_JOB)=' >&2; exec awk -v lr={lr} -v steps={steps} \"$0\"");
    job.arg(&program);
    Run::start(job).end().expect(0);
    assert_eq!(decisions("job"), decisions("two"));
    for log in glob(&folder.path().join("job"), "output.log") {
        let log = fs::read_to_string(log).unwrap();
        assert!(
            log.contains("\"loss\"") && !log.contains('='),
            "no rank of the job: {log}"
        );
    }
    // Programs cannot take turns on a slot.
    tune("one", 1)
        .expect(2)
        .says("each of the workers needs a slot");
}

/// Returns the files of that name in the folders of a folder.
fn glob(folder: &Path, name: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path().join(name));
    let found: Vec<_> = paths.filter(|path| path.exists()).collect();
    assert!(!found.is_empty());
    found
}

#[test]
fn a_search_without_its_agent_ends_with_the_name_of_the_host_and_continues_when_it_is_started_again()
 {
    let folder = Folder::new();
    folder.write("spec.toml", SPEC);
    // Without the file `calm`, the trial on the second slot ends its agent, which is its parent.
    let program = "[ -e calm ] || {{ [ {trial} != 00001 ] || kill -9 $PPID; sleep 600; }}
                   for step in 1 2 3 4 5 6 7 8; do echo '{{\"loss\": 0.5}}'; done";
    let job = || {
        let mut command = folder.command(&format!(
            "--num-processes 2 {LAUNCHER} tune spec.toml --folder job --slots 2 -- sh -c"
        ));
        command.args([program, "{lr}"]);
        Run::start(command).end()
    };
    let ended = job().says("is lost, with its trials");
    assert!(!ended.status.success(), "{ended:?}");
    folder.write("calm", "");
    job()
        .expect(0)
        .prints("Number of trials: 6/6 (6 TERMINATED)");
}

#[test]
fn a_specification_that_cannot_be_is_refused_with_its_place() {
    let folder = Folder::new();
    for (text, expected) in [
        (SPEC.replace("uniform", "unifrom"), "did you mean `uniform`"),
        (SPEC.replace("max_t", "max_time"), "max_time"),
        (SPEC.replace("parabola", "../a"), "`name` is \"../a\""),
        (SPEC.replace("parabola", ""), "`name` is \"\""),
        (
            SPEC.replace("lr = ", "trial = "),
            "the parameter `trial` has the name of a placeholder",
        ),
        (
            SPEC.replace("steps = ", "\"a/b\" = "),
            "the parameter \"a/b\" has a `/`",
        ),
        (
            SPEC.replace("num_samples = 6", "points_to_evaluate = [{ rate = 0.1 }]"),
            "`points_to_evaluate[0]`: `rate` is no parameter",
        ),
        (
            SPEC.replace("num_samples = 6", "num_samples = six"),
            "spec.toml",
        ),
        (
            SPEC.replace("reduction_factor = 2", "reduction_factor = 1"),
            "`reduction_factor` is 1",
        ),
    ] {
        folder.write("spec.toml", &text);
        folder.refuses("tune spec.toml -- true", expected);
    }
    folder
        .launch("tune best nowhere")
        .says("nowhere has no search");
    folder.refuses(
        "tune spec.toml --bin train",
        "only a launch builds programs",
    );
    folder.write("spec.toml", SPEC);
    let ended = folder.launch("tune spec.toml -- no-such-program {lr}");
    ended.says("such as target/release/no-such-program");
}

#[test]
fn a_search_whose_launcher_is_killed_continues_where_it_was() {
    let folder = Folder::new();
    folder.write("spec.toml", "name = \"s\"\nmetric = \"loss\"\nmode = \"min\"\nslots = 2\nnum_samples = 2\n[space]\nx = 1\n[stop]\ntraining_iteration = 3\n");
    // The trial continues once the file `go` exists.
    folder.script(
        "trial.sh",
        "for i in 1 2 3; do echo '{\"loss\": 1}'; while [ $i = 2 -a ! -e go ]; do sleep 0.05; done; done",
    );
    let run = folder.start("tune spec.toml --folder s -- sh trial.sh");
    let journal = || folder.read("s/journal.jsonl");
    wait_until("reports", || {
        (journal().matches("reported").count() == 4).then_some(())
    });
    run.signal(Signal::KILL);
    run.end();
    wait_until("the end of the search", || {
        let lock = fs::File::open(folder.path().join("s/search.lock")).unwrap();
        lock.try_lock().ok()
    });
    assert!(!journal().contains("failed"), "{}", journal());
    assert!(!journal().contains("finished"), "{}", journal());
    folder.write("go", "");
    // The search resumes from any folder.
    let line = format!("tune resume {}", folder.path().join("s").display());
    let mut command = folder.command(&line);
    command.current_dir("/");
    let ended = Run::start(command).end().expect(0);
    ended.prints("Number of trials: 2/2 (2 TERMINATED)");
}

#[test]
fn a_silent_program_ends_with_its_search_and_launcher_that_are_both_killed() {
    let folder = Folder::new();
    folder.write("spec.toml", SPEC);
    folder.script("trial.sh", "trap '' TERM; sleep 300 & > begun; wait");
    let run = folder.start("tune spec.toml --folder s --slots 2 -- sh trial.sh");
    wait_until("a trial", || {
        folder.path().join("begun").exists().then_some(())
    });
    // The lock contains text such as `process 7 on host`.
    let lock = folder.read("s/search.lock");
    let search = lock.split_whitespace().nth(1).unwrap().parse().unwrap();
    let search = Pid::from_raw(search).unwrap();
    // The launcher's shim would end the trials of a search whose end it sees.
    run.signal(Signal::STOP);
    rustix::process::kill_process(search, Signal::KILL).unwrap();
    run.signal(Signal::KILL);
    let works_there = |process: &fs::DirEntry| {
        let directory = fs::read_link(process.path().join("cwd"));
        directory.is_ok_and(|directory| directory == folder.path())
    };
    wait_until("the end of every program", || {
        let mut processes = fs::read_dir("/proc").unwrap().flatten();
        (!processes.any(|process| works_there(&process))).then_some(())
    });
    run.end();
}

#[test]
fn a_search_without_a_report_says_what_one_is() {
    let folder = Folder::new();
    folder.write("spec.toml", SPEC);
    folder
        .launch("tune spec.toml --slots 2 -- echo loss: 1")
        .expect(1)
        .prints("ERROR without a report")
        .prints("it ended without a report; report at least once")
        .says("no trial has reported a number as `loss`");
}

/// The output goes through a pipe, to which Python writes in blocks by default, so the report would arrive at the end.
#[test]
fn a_program_of_python_is_read_while_it_runs() {
    if std::process::Command::new("python3")
        .arg("-V")
        .output()
        .is_err()
    {
        // The test harness captures `eprintln`, and shows nothing if a test passes.
        let _ = writeln!(std::io::stderr(), "SKIPPED: there is no python3");
        return;
    }
    let folder = Folder::new();
    folder.write("spec.toml", "name = \"s\"\nmetric = \"loss\"\nmode = \"min\"\n[space]\nx = 1\n[stop]\ntraining_iteration = 1\n");
    folder.write(
        "train.py",
        "import os, time\nprint('{\"loss\": 1}')\nwhile not os.path.exists('late'): time.sleep(0.05)\n",
    );
    let run = folder.start("tune spec.toml --folder s -- python3 train.py");
    wait_until("the report", || {
        let journal = folder.read("s/journal.jsonl");
        journal.contains("reported").then_some(())
    });
    // The search stops the program, or this file ends it.
    folder.write("late", "");
    run.end().expect(0);
}

#[test]
fn a_misspelt_metric_ends_the_search_at_the_first_object_without_it() {
    let folder = Folder::new();
    let misspelt = SPEC.replace("\"loss\"", "\"los\"");
    let tune = |spec: &str| {
        folder.write("spec.toml", spec);
        let mut command = folder.command("tune spec.toml --folder s --slots 2 --");
        // Objects without numbers are not metrics.
        command.args([
            "printf",
            "{{\"event\": \"begin\"}}\n{{\"loss\": 1, \"acc\": 2}}\n",
        ]);
        Run::start(command).end()
    };
    tune(&misspelt)
        .expect(2)
        .says("`metric` is `los`, and trial 0")
        .says("without it: acc, loss; did you mean `loss`?");
    // If the specification allows it, programs may print other objects first.
    let lenient = format!("disable_strict_metric_checking = true\n{misspelt}");
    tune(&lenient).expect(1);
}

#[test]
fn a_command_that_could_not_start_may_be_corrected() {
    let folder = Folder::new();
    folder.write("spec.toml", SPEC);
    let tune =
        |program: &str| folder.launch(&format!("tune spec.toml --folder s --slots 2 -- {program}"));
    for (program, expected) in [
        (
            "sh {rate}",
            "`{rate}` in the program's arguments is no parameter",
        ),
        ("./missing {lr}", "cannot start ./missing"),
    ] {
        tune(program).expect(2).says(expected);
    }
    tune("echo {{\"loss\":{lr}}}").expect(0);
    tune("echo {lr}").says("holds another search: its `program`");
}

/// Each rank prints its lines.
#[test]
fn of_a_trial_of_several_processes_rank_0_reports() {
    let folder = Folder::new();
    let spec = "name = \"s\"\nmetric = \"loss\"\nmode = \"min\"\n[space]\nx = 1\n[resources_per_trial]\nprocesses = 2\n";
    folder.write("spec.toml", spec);
    let tune = |name: &str, program: &str| {
        let line = format!("tune spec.toml --folder {name} --slots 1 -- sh -c");
        let mut command = folder.command(&line);
        command.arg(program);
        Run::start(command).end()
    };
    let rows = |name: &str| folder.launch(&format!("tune show {name} --json")).json();
    let program = "for i in 1 2 3; do echo \"{{\\\"loss\\\": $RANK, \\\"step\\\": $i}}\"; done";
    tune("both", program).expect(0);
    let row = &rows("both")[0];
    assert_eq!(row["training_iteration"], 3, "{row}");
    assert_eq!((&row["loss"], &row["step"]), (&0.0.into(), &3.0.into()));
    // The error says that the reports are lost.
    tune("other", "[ $RANK = 0 ] || echo '{{\"loss\": 1}}'").expect(1);
    let row = &rows("other")[0];
    assert_eq!(row["status"], "ERROR", "{row}");
    let error = fs::read_to_string(&glob(&folder.path().join("other"), "error.txt")[0]).unwrap();
    assert!(
        error.starts_with("rank 1 printed reports, and rank 0 none"),
        "{error}"
    );
}

#[test]
fn the_best_result_is_shown_with_its_checkpoint() {
    let folder = Folder::new();
    let spec =
        "name = \"s\"\nmetric = \"loss\"\nmode = \"min\"\n[space]\nx = { uniform = [0.0, 1.0] }\n";
    folder.write("spec.toml", spec);
    let mut command = folder.command("tune spec.toml --folder all --slots 1");
    let program = r#"for i in 2 1 3; do
            echo $i > "$0/at$i"
            printf '{{"loss": %d, "checkpoint": "%s"}}\n' $i "$0/at$i"
        done; : {x}"#;
    command.args(["--", "sh", "-c", program, "{folder}"]);
    Run::start(command).end().expect(0);
    let shown = folder.json("tune best all --json");
    assert_eq!(shown["training_iteration"], 2);
    assert_eq!(shown["checkpoint_iteration"], 2);
    let path = shown["checkpoint"].as_str().unwrap();
    assert!(path.ends_with("checkpoint_000002/at1"), "{path}");
    assert_eq!(fs::read_to_string(folder.path().join(path)).unwrap(), "1\n");
    folder.launch("tune best all").expect(0).prints(path);
}

#[test]
fn infinite_parameters_and_values_are_shown_as_json_can_hold_them() {
    let folder = Folder::new();
    let spec = "name = \"s\"\nmetric = \"loss\"\nmode = \"max\"\n[space]\nclip = inf\nlow = nan\n";
    folder.write("spec.toml", spec);
    let program = r#"echo {low} {{"loss":{clip}}}"#;
    let line = "tune spec.toml --folder all/s --slots 1 --";
    let ended = folder.launch(&format!("{line} {program}")).expect(0);
    let config = r#"{"clip":"Infinity","low":"NaN"}"#;
    ended.prints(&format!("Best config is: {config}"));
    let show = |line: &str| folder.json(line);
    let best = show("tune best all/s --json");
    assert_eq!(best["config"].to_string(), config);
    assert_eq!(best["value"], "Infinity");
    assert_eq!(show("tune list all --json")[0]["best"], "Infinity");
    let row = &show("tune show all/s --json")[0];
    for (name, expected) in [
        ("loss", "Infinity"),
        ("best_loss", "Infinity"),
        ("config/clip", "Infinity"),
        ("config/low", "NaN"),
    ] {
        assert_eq!(row[name], expected, "{name}");
    }
}
