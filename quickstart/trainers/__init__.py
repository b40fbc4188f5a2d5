"""The trainers: `api` starts and ends a run, `ppo` is verl's PPO trainer in this process. Losses are verl's."""
