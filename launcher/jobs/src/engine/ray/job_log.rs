//! The log of a job, which has the output of all its nodes.

/// What begins a line that is not node 0's, as in JSON text sequences.
const MARK: char = '\x1e';

/// The output of an instance, that of node 0 where none is named, in the log of a job; `None` before its driver has begun.
///
/// Ray appends to the log of a job that had the same name, so the driver begins with Ray's number of the job.
pub(super) fn output_of(log: &str, job_id: Option<&str>, instance: Option<&str>) -> Option<String> {
    let begin = format!("{MARK}{{\"job_id\": \"{}\"}}\n", job_id?);
    let (_, log) = log.rsplit_once(begin.as_str())?;
    let mark = instance.map(|name| format!("{MARK}[{name}] "));
    let lines = log.split_inclusive('\n');
    let output = lines.filter_map(|line| match &mark {
        Some(mark) => line.strip_prefix(mark.as_str()),
        None => Some(line).filter(|line| !line.starts_with(MARK)),
    });
    Some(output.collect())
}

/// The last `tail` lines of a text, or all of it.
pub(super) fn tail_of(text: &str, tail: Option<usize>) -> &str {
    let Some(tail) = tail else { return text };
    let lines: Vec<_> = text.split_inclusive('\n').collect();
    let rest: usize = lines[..lines.len().saturating_sub(tail)]
        .iter()
        .map(|line| line.len())
        .sum();
    &text[rest..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_told_apart() {
        let log = "old\n\x1e{\"job_id\": \"01\"}\nolder\n\x1e{\"job_id\": \"02\"}\n[0] one\n\x1e[a-worker-0] joined\n[1] two\n";
        let output = |instance| output_of(log, Some("02"), instance);
        assert_eq!(output(None).unwrap(), "[0] one\n[1] two\n");
        assert_eq!(output(Some("a-worker-0")).unwrap(), "joined\n");
        assert_eq!(output(Some("a-worker-1")).unwrap(), "");
        assert_eq!(output_of(log, Some("03"), None), None);
        assert_eq!(output_of("sh: python: not found\n", None, None), None);
    }

    #[test]
    fn tails_are_lines() {
        assert_eq!(tail_of("a\nb\nc", Some(2)), "b\nc");
        assert_eq!(tail_of("a\nb\n", Some(1)), "b\n");
        assert_eq!(tail_of("a\n", Some(5)), "a\n");
        assert_eq!(tail_of("a\n", Some(0)), "");
        assert_eq!(tail_of("a\n", None), "a\n");
    }
}
