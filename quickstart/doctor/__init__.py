"""What is checked before anything heavy starts. Reads files and versions; loads no weights, builds no model.

    python -m quickstart doctor [--config FILE] [section.key=value ...] [--json]

`command` is that command; `before` is the cheap part that every training run does first. In between: `facts` gathers
what is there, `checks` lists who judges it, and the judges (`machine`, `packages`, `accelerator`, `architecture`,
`tokens`, `plan`, `memory`, `settings`, `rewardtest`, `rows`) are functions of facts alone, so that a test invents a
machine. Not here: refusing a config by itself (quickstart.config), or verifying a run that is over.
"""
