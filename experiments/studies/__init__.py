"""Studies, which the wheel lacks; of the other commands only `report` imports one."""
