//! Makes tables of the results.

use std::error::Error;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// The settings of `report`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// The folder with the JSON objects; the tables are written into it as `gpu.md`
    folder: PathBuf,
}

/// Reads the results in the folder and writes their tables; leaves out missing ones.
pub(crate) fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let found = read(&args.folder)?;
    let text = tables(&found, &args.folder)?;
    std::fs::write(args.folder.join("gpu.md"), &text)?;
    print!("{text}");
    Ok(())
}

/// Reads the JSON objects of a folder, in the order of the file names. Skips an object that a failed part has left
/// incomplete.
fn read(folder: &Path) -> Result<Vec<Value>, Box<dyn Error>> {
    let mut paths = std::fs::read_dir(folder)?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<Vec<_>, _>>()?;
    paths.retain(|path| path.extension().is_some_and(|end| end == "json"));
    paths.sort();
    let mut found = Vec::new();
    for path in paths {
        match serde_json::from_slice(&std::fs::read(&path)?) {
            Ok(value) => found.push(value),
            Err(error) => eprintln!("{} is left out: {error}", path.display()),
        }
    }
    Ok(found)
}

fn tables(found: &[Value], folder: &Path) -> Result<String, Box<dyn Error>> {
    let mut text = String::from("# Measured on a GPU\n\n");
    let of = |measure: &'static str| {
        found
            .iter()
            .filter(move |value| value["measure"] == measure)
    };
    if let Ok(machine) = std::fs::read_to_string(folder.join("machine.txt")) {
        writeln!(text, "```text\n{}\n```\n", machine.trim_end())?;
    }
    if let Ok(parts) = std::fs::read_to_string(folder.join("parts.tsv")) {
        text += "| part | outcome | seconds |\n|---|---|---|\n";
        for line in parts.lines() {
            writeln!(text, "| {} |", line.replace('\t', " | "))?;
        }
        text.push('\n');
    }
    for probe in of("probe") {
        writeln!(
            text,
            "Device `{}` ({}), kernels by {}, autotune {}; bf16 {}, f16 {}, f64 {}; error of a product of f32 matrices {}.\n",
            word(&probe["device"]),
            word(&probe["name"]),
            word(&probe["kernel_compiler"]),
            probe["autotune"],
            probe["bf16"],
            probe["f16"],
            probe["f64"],
            number(&probe["matmul_relative_error"]),
        )?;
    }
    plain_and_prepared(&mut text, of("plain_and_prepared"))?;
    torch(&mut text, of("torch_and_accelerate"))?;
    side_by_side(&mut text, found)?;
    shared_gpu(&mut text, of("shared_gpu"))?;
    loss_curves(&mut text, of("loss_curves"))?;
    if let Ok(lines) = std::fs::read_to_string(folder.join("all_reduce.txt")) {
        writeln!(
            text,
            "## All-reduce by NCCL, one rank\n\n```text\n{}\n```\n",
            lines.trim_end()
        )?;
    }
    Ok(text)
}

fn plain_and_prepared<'a>(
    text: &mut String,
    rows: impl Iterator<Item = &'a Value>,
) -> std::fmt::Result {
    *text += "## A prepared loop beside plain Burn\n\n\
        Medians, quartiles in brackets; ratio: the time of a prepared step over that of a plain one. Ahead: \
        how much of three steps the device still had to do when the program had started them. First steps: eight, in which \
        kernels are compiled and chosen.\n\n\
        | model | in | batch | plain, samples/s | prepared | ratio | reserved MiB, plain, prepared | by the driver | \
        ahead ms, plain, prepared | pairs | first steps, s |\n|---|---|---|---|---|---|---|---|---|---|---|\n";
    for row in rows {
        write!(
            text,
            "| {} | {} | {} | ",
            word(&row["model"]),
            word(&row["precision"]),
            row["batch_size"]
        )?;
        if let Some(skipped) = row["skipped"].as_str() {
            writeln!(text, "{skipped} | | | | | | | |")?;
            continue;
        }
        let both = |of: &dyn Fn(&Value) -> String| {
            format!("{}, {}", of(&row["plain"]), of(&row["prepared"]))
        };
        writeln!(
            text,
            "{} | {} | {} | {} | {} | {} | {} | {} |",
            spread(&row["plain"]["samples_per_second"]),
            spread(&row["prepared"]["samples_per_second"]),
            spread(&row["ratio"]),
            both(&|side| number(&side["memory"]["reserved_mib"])),
            both(&|side| number(&side["memory"]["driver_mib"])),
            both(&|side| format!(
                "{} of {}",
                number(&side["ahead"]["ahead_ms"]["median"]),
                number(&side["ahead"]["done_ms"]["median"])
            )),
            row["pairs"],
            number(&row["first_steps_seconds"]),
        )?;
    }
    text.push('\n');
    Ok(())
}

fn torch<'a>(text: &mut String, rows: impl Iterator<Item = &'a Value>) -> std::fmt::Result {
    *text += "## PyTorch, and Accelerate\n\n\
        The same models, batches and optimizer; ratio: Accelerate over plain PyTorch.\n\n\
        | model | in | TF32 | batch | plain, samples/s | Accelerate | ratio | reserved MiB, plain, Accelerate |\n\
        |---|---|---|---|---|---|---|---|\n";
    for row in rows {
        writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} | {} | {}, {} |",
            word(&row["model"]),
            word(&row["precision"]),
            row["tf32"],
            row["batch_size"],
            spread(&row["plain"]["samples_per_second"]),
            spread(&row["accelerate"]["samples_per_second"]),
            spread(&row["ratio"]),
            number(&row["plain"]["memory"]["reserved_mib"]),
            number(&row["accelerate"]["memory"]["reserved_mib"]),
        )?;
    }
    text.push('\n');
    Ok(())
}

/// Writes the ratio of the results that both have for the same batch.
fn side_by_side(text: &mut String, found: &[Value]) -> std::fmt::Result {
    *text += "## Prepared Burn beside Accelerate\n\n\
        | model | in | TF32 there | prepared Burn, samples/s | Accelerate | ours / theirs |\n|---|---|---|---|---|---|\n";
    let rate = |side: &Value| side["samples_per_second"]["median"].as_f64();
    for ours in found
        .iter()
        .filter(|row| row["measure"] == "plain_and_prepared")
    {
        for theirs in found
            .iter()
            .filter(|row| row["measure"] == "torch_and_accelerate")
        {
            let same = ["model", "precision", "batch_size", "size", "device"];
            if same.iter().any(|&key| ours[key] != theirs[key]) {
                continue;
            }
            if let (Some(a), Some(b)) = (rate(&ours["prepared"]), rate(&theirs["accelerate"])) {
                let (model, computing) = (word(&ours["model"]), word(&ours["precision"]));
                let (tf32, ratio) = (&theirs["tf32"], a / b);
                writeln!(
                    text,
                    "| {model} | {computing} | {tf32} | {a:.0} | {b:.0} | {ratio:.2} |"
                )?;
            }
        }
    }
    text.push('\n');
    Ok(())
}

fn shared_gpu<'a>(text: &mut String, rows: impl Iterator<Item = &'a Value>) -> std::fmt::Result {
    *text += "## Two ranks on one GPU\n\n\
        Through the host's memory, SGD. Relative differences of parameters from those of one rank that takes the two halves \
        of each batch in turn; times are medians in milliseconds a step.\n\n\
        | model | steps | one rank again | its batches whole | overlap off | on | moved | step, one rank, whole batch | step, off, on | waiting, off, on | \
        communicating, off, on | exposed, off, on | passed |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|\n";
    for row in rows {
        let milliseconds = |value: &Value| {
            let seconds = value["median"].as_f64();
            seconds.map_or_else(|| "?".to_owned(), |seconds| format!("{:.2}", seconds * 1e3))
        };
        let both = |figure: &str| {
            let (off, on) = (&row["overlap_off"][figure], &row["overlap_on"][figure]);
            format!("{}, {}", milliseconds(off), milliseconds(on))
        };
        writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            word(&row["model"]),
            row["steps"],
            number(&row["repeated_difference"]),
            number(&row["difference_whole_batch"]),
            number(&row["difference_overlap_off"]),
            number(&row["difference_overlap_on"]),
            number(&row["moved"]),
            milliseconds(&row["whole_batch"]["step"]),
            both("step"),
            both("waiting"),
            both("communicating"),
            both("exposed"),
            row["passed"],
        )?;
    }
    text.push('\n');
    Ok(())
}

fn loss_curves<'a>(text: &mut String, rows: impl Iterator<Item = &'a Value>) -> std::fmt::Result {
    *text += "## Half precision over f32 parameters\n\n\
        | model | in | steps | skipped | mean loss of the last quarter | accuracy | largest distance of curves | \
        within tolerance |\n|---|---|---|---|---|---|---|---|\n";
    for row in rows {
        let model = word(&row["model"]);
        let mut line = |computing: &str, training: &Value| {
            if let Some(skipped) = training["skipped"].as_str() {
                return writeln!(text, "| {model} | {computing} | {skipped} | | | | | |");
            }
            writeln!(
                text,
                "| {model} | {computing} | {} | {} | {} | {} | {} | {} |",
                training["steps"],
                training["skipped_steps"],
                number(&training["end_loss"]),
                number(&training["accuracy"]),
                number(&training["largest_distance"]),
                training["within_tolerance"]
                    .as_bool()
                    .map_or("", |within| if within { "yes" } else { "no" }),
            )
        };
        line("f32", &row["f32"])?;
        for half in row["half"].as_array().into_iter().flatten() {
            line(&word(&half["precision"]), half)?;
        }
    }
    text.push('\n');
    Ok(())
}

fn word(value: &Value) -> String {
    value.as_str().unwrap_or("?").to_owned()
}

/// Formats a number with up to four significant digits.
fn number(value: &Value) -> String {
    match value.as_f64() {
        None => "?".to_owned(),
        Some(0.0) => "0".to_owned(),
        Some(number) if number.abs() < 1e-2 => format!("{number:.1e}"),
        Some(number) if number.abs() >= 100.0 => format!("{number:.0}"),
        Some(number) => format!("{number:.3}"),
    }
}

fn spread(value: &Value) -> String {
    let [lower, median, upper] = ["lower", "median", "upper"].map(|key| number(&value[key]));
    format!("{median} [{lower}, {upper}]")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_both_measured_is_compared_and_nothing_else() {
        let side = |rate: f64| json!({ "samples_per_second": { "median": rate } });
        let row = |measure: &str, model: &str, key: &str, rate| {
            json!({ "measure": measure, "model": model, "precision": "f32", "batch_size": 8, "size": "full",
                "device": "cuda", "tf32": false, key: side(rate) })
        };
        let found = [
            row("plain_and_prepared", "cnn", "prepared", 300.0),
            row("torch_and_accelerate", "cnn", "accelerate", 400.0),
            row("torch_and_accelerate", "transformer", "accelerate", 1.0),
        ];
        let mut text = String::new();
        side_by_side(&mut text, &found).unwrap_or_else(|error| panic!("{error}"));
        assert!(
            text.contains("| cnn | f32 | false | 300 | 400 | 0.75 |"),
            "{text}"
        );
        assert!(!text.contains("transformer"), "{text}");
    }
}
