//! What a check found: its verdict, why it matters, and the command that corrects it; as text and as JSON.
//!
//! Invariants: the name of a check never changes its meaning. Text and JSON have the same contents.

use serde::Serialize;
use std::fmt::Write;

/// The verdict of a check, from the best to the worst.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// Worth knowing.
    Note,
    /// CBD works, but not as well as it could, or a promise is weaker than it could be.
    Warning,
    /// CBD cannot work, or data is in danger.
    Problem,
}

impl Verdict {
    const ALL: [Self; 4] = [Self::Problem, Self::Warning, Self::Note, Self::Ok];

    const fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warning => "WARNING",
            Self::Problem => "PROBLEM",
        }
    }
}

/// The result of one check of one object.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Finding {
    /// The stable name of the check.
    pub check: &'static str,
    /// The verdict.
    pub verdict: Verdict,
    /// The disk, file or process, where the check is of one of several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subject: Option<String>,
    /// What was found.
    pub found: String,
    /// Why it matters for CBD; absent where all is well.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// The commands, or the lines of a file, that correct it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub fix: Vec<String>,
}

impl Finding {
    fn new(check: &'static str, verdict: Verdict, found: impl Into<String>) -> Self {
        Self { check, verdict, subject: None, found: found.into(), why: None, fix: Vec::new() }
    }

    pub fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Verdict::Ok, found)
    }

    pub fn note(check: &'static str, found: impl Into<String>, why: &str) -> Self {
        Self { why: Some(why.to_owned()), ..Self::new(check, Verdict::Note, found) }
    }

    pub fn warning(check: &'static str, found: impl Into<String>, why: &str) -> Self {
        Self { why: Some(why.to_owned()), ..Self::new(check, Verdict::Warning, found) }
    }

    pub fn problem(check: &'static str, found: impl Into<String>, why: &str) -> Self {
        Self { why: Some(why.to_owned()), ..Self::new(check, Verdict::Problem, found) }
    }

    /// Names the object that was checked.
    pub fn of(mut self, subject: impl Into<String>) -> Self {
        self.subject = Some(subject.into());
        self
    }

    /// Adds a command, or a line of a file, that corrects it.
    pub fn fix(mut self, line: impl Into<String>) -> Self {
        self.fix.push(line.into());
        self
    }
}

/// All findings.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Report {
    /// The version of this program.
    pub version: &'static str,
    /// The worst verdict.
    pub verdict: Verdict,
    /// The findings, in the order of the checks.
    pub findings: Vec<Finding>,
    /// What could not be seen, and why.
    pub unseen: Vec<String>,
}

impl Report {
    pub fn new(findings: Vec<Finding>, unseen: Vec<String>) -> Self {
        let verdict = findings.iter().map(|finding| finding.verdict).max().unwrap_or(Verdict::Ok);
        Self { version: env!("CARGO_PKG_VERSION"), verdict, findings, unseen }
    }

    /// The page for people.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for finding in &self.findings {
            describe(finding, &mut text);
        }
        for unseen in &self.unseen {
            let _ = writeln!(text, "{:<9}{unseen}", "not seen");
        }
        let counted: Vec<String> = Verdict::ALL
            .into_iter()
            .map(|verdict| {
                let count = self.findings.iter().filter(|finding| finding.verdict == verdict).count();
                let word = verdict.word().to_lowercase();
                if count == 1 || verdict == Verdict::Ok {
                    format!("{count} {word}")
                } else {
                    format!("{count} {word}s")
                }
            })
            .collect();
        let _ = writeln!(text, "{}", counted.join(", "));
        text
    }
}

fn describe(finding: &Finding, text: &mut String) {
    let subject = finding.subject.as_ref().map_or_else(String::new, |subject| format!(" {subject}:"));
    // A path or a serial number may be any bytes.
    let shown = |line: &str| line.replace(|letter: char| letter.is_control(), "?");
    let _ = writeln!(
        text,
        "{:<9}{}{}  {}",
        finding.verdict.word(),
        finding.check,
        shown(&subject),
        shown(&finding.found)
    );
    if let Some(why) = &finding.why {
        let _ = writeln!(text, "         why:  {}", shown(why));
    }
    for line in &finding.fix {
        let _ = writeln!(text, "         do:  {}", shown(line));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_json_have_the_same_contents() {
        let findings = vec![
            Finding::ok("kernel.version", "Linux 6.8"),
            Finding::problem("boot.fstab", "line 3", "the raw disk").of("/dev/sdb\n").fix("edit it"),
        ];
        let report = Report::new(findings, vec!["the disks: no root".to_owned()]);
        assert_eq!(report.verdict, Verdict::Problem);
        assert_eq!(
            report.text(),
            "ok       kernel.version  Linux 6.8\n\
             PROBLEM  boot.fstab /dev/sdb?:  line 3\n         why:  the raw disk\n         do:  edit it\n\
             not seen the disks: no root\n\
             1 problem, 0 warnings, 0 notes, 1 ok\n"
        );
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["verdict"], "problem");
        assert_eq!(json["findings"][1]["fix"][0], "edit it");
        assert_eq!(json["findings"][0].get("why"), None);
    }
}
